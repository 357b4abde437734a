from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from infinipipe.cli.simulate import run
from infinipipe.cost.files import save_cost
from infinipipe.cost.presets import preset
from infinipipe.cost.shape import CostError
from infinipipe.plan import Chunk, Pipeline, Plan, PlanError, build_replica, save, whole
from infinipipe.settings import SettingError
from infinipipe.simulate import simulate_plan
from infinipipe.timeline import load
from infinipipe.timeline.units import readable_seconds

LENGTHS = (4000, 3000, 2000, 6000)


@pytest.fixture
def plan() -> Plan:
    """Two replicas on two stages; the second has more to do."""
    chunks = [Chunk(whole(LENGTHS, [i])) for i in range(4)]
    replicas = [build_replica([Pipeline(tuple(part))], 2) for part in (chunks[:1], chunks[1:])]
    return Plan((16, 16), LENGTHS, tuple(replicas))


@pytest.fixture
def plan_file(plan: Plan, tmp_path: Path) -> str:
    save(plan, tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def test_it_reports_the_slowest_replica_and_writes_its_timeline(
    plan: Plan, plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "step.json"
    assert run([plan_file, "7b-a100", "--memory_budget", "0.5", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    expected = simulate_plan(plan, preset("7b-a100", (16, 16)), budget=2**29)[1]
    assert load(output) == expected.timeline
    assert f"step {readable_seconds(expected.makespan)}" in printed
    assert printed.count("over budget") == 2
    assert "replica 0: " in printed
    assert f"{expected.bubble_fraction:.1%} of all stages' time" in printed


def test_a_cost_file_and_a_replica_can_be_named(
    plan: Plan, plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = preset("7b-a100", (16, 16), sequence_parallel=2)
    cost = dataclasses.replace(cost, optimizer=2.0 / max(cost.states))
    save_cost(cost, tmp_path / "cost.json")
    assert run([plan_file, str(tmp_path / "cost.json"), "--replica", "0"]) == 0
    printed = capsys.readouterr().out
    assert f"step {readable_seconds(simulate_plan(plan, cost)[0].makespan)}" in printed
    assert "optimizer step, after it: 2.00 s" in printed


def test_nothing_is_cut_off_on_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    chunks = tuple(Chunk(whole(LENGTHS, [i])) for i in range(4))
    replica = build_replica([Pipeline(chunks)], 2, schedule="zero-bubble", recompute=[[16] * 4] * 2)
    save(Plan((16, 16), LENGTHS, (replica,)), tmp_path / "plan.json")
    assert run([str(tmp_path / "plan.json"), "7b-a100", "--memory_budget", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert printed.count("over budget") == 2
    assert all(word in printed for word in ("weight", "GiB"))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["7b-a100", "--replica", "2"], SettingError, "replica is 2, but the plan has 2"),
        (["7b-a100", "--memory_budget", "0"], SettingError, "memory_budget must be above 0"),
        (["7b-a100", "--memory_budget", "much"], SettingError, "--memory_budget: Expected a float. Got value: much"),
        ([], SettingError, "the following arguments are required: cost"),
        (["9b-a100"], CostError, "no preset '9b-a100'"),
        (["missing.json"], CostError, r"cannot read the cost file missing\.json"),
        (["13b-a100"], CostError, "40 layers"),
    ],
)
def test_errors_are_in_the_users_words(
    plan_file: str, arguments: list[str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run([plan_file, *arguments])


def test_the_output_is_none_of_the_inputs(plan_file: str, tmp_path: Path) -> None:
    cost_file = tmp_path / "cost.json"
    save_cost(preset("7b-a100", (16, 16)), cost_file)
    for path in (Path(plan_file), cost_file):
        before = path.read_bytes()
        with pytest.raises(SettingError, match="is a file that is read; name another file"):
            run([plan_file, str(cost_file), "--output", str(path)])
        assert path.read_bytes() == before


def test_a_broken_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanError, match="no field 'version'"):
        run([str(tmp_path / "plan.json"), "7b-a100"])


def test_simulating_and_drawing_need_no_torch() -> None:
    code = "import sys, infinipipe.cli.simulate, infinipipe.cli.timeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
