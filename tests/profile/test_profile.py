"""``infinipipe profile`` on real processes, interrupted and resumed."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config

from infinipipe.cli.main import main
from infinipipe.cli.profile import ProfileOptions, make_setup
from infinipipe.cost.files import load_cost
from infinipipe.profile import Design, Parts, Setup, fit_profile, formula, measure
from infinipipe.profile.samples import plan_samples
from infinipipe.profile.session import setups
from infinipipe.profile.timing import Run
from infinipipe.profile.workers import with_layers
from infinipipe.runtime import Event
from infinipipe.simulate import simulate
from infinipipe.verify.families import FAMILIES

SIZES = [
    "--longest",
    "128",
    "--capacity",
    "64",
    "--smallest",
    "16",
    "--max_slices",
    "4",
    "--plans",
    "8",
    "--repeats",
    "1",
]
DESIGN = Design(longest=128, capacity=64, smallest=16, max_slices=4, num_plans=8)


class InterruptedByTestError(Exception):
    """What stops a profile in a test."""


def make_config() -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )


def test_an_interrupted_profile_goes_on(tmp_path: Path) -> None:
    setup, partial = Setup(make_config(), (1, 1)), tmp_path / "cost.json.partial"

    def stop(what: str, done: int, total: int) -> None:
        if done == 5:
            raise InterruptedByTestError

    with pytest.raises(InterruptedByTestError):
        measure(setup, DESIGN, 1, partial, stop)
    before = partial.read_text()
    assert len(before.splitlines()) == 1 + 5
    measured = measure(setup, DESIGN, 1, partial, lambda what, done, total: None)
    after = partial.read_text()
    assert after.startswith(before)
    timed = [runs for _, runs in measured.timed]
    assert len(measured.metered) == len(timed) == 2 * DESIGN.num_plans
    assert min(map(len, timed)) >= 1
    assert len(after.splitlines()) == 1 + len(measured.metered) + sum(map(len, timed)) + 2
    profile = fit_profile(setup, measured, (1, 1))
    assert 0.95 < profile.memory.kept < 1.05
    assert 0.9 < profile.memory.backward < 1.1
    for plan, run in measured.metered[: DESIGN.num_plans]:
        simulated = simulate(plan.replicas[0], profile.cost)
        for stage, events in enumerate(run.events):
            peak = max(event.peak for event in events)
            assert simulated.peaks[stage] - profile.cost.states[stage] == pytest.approx(peak, rel=0.15)


def test_parts_resume_only_their_own(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    first = Parts.resume(path, "a")
    assert first.get("x", lambda: [1]) == [1]
    assert first.get("x", lambda: [2]) == [1]
    with path.open("a") as file:
        file.write('{"y": 3')
    before = path.read_text()
    path.with_name("same").hardlink_to(path)
    again = Parts.resume(path, "a")
    assert path.with_name("same").read_text() == before
    assert again.stored == {"x": [1]}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"key": "a"}, {"x": [1]}]
    assert Parts.resume(path, "b").stored == {}


def test_layers_are_told_from_stages() -> None:
    whole, half = setups(Setup(make_config(), (4, 4)))
    assert (whole.stage_layers, half.stage_layers) == ((4, 4), (2, 2))
    assert setups(Setup(make_config(), (1, 2)))[1].stage_layers == (1, 1)
    assert setups(Setup(make_config(), (1, 1)))[1].stage_layers == (2, 2)
    qwen = Qwen2Config(num_hidden_layers=3)
    assert with_layers(qwen, 2).layer_types == qwen.layer_types[:2]


def test_windows_of_measured_and_described_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    types = ["sliding_attention"] * 5 + ["full_attention"]
    FAMILIES["gemma3"](num_hidden_layers=12, layer_types=types * 2).save_pretrained(tmp_path)
    options = ProfileOptions(str(tmp_path), "cost.json", stages=4, stage_layers=[3, 3, 3, 3], processes=2)
    setup, stage_layers = make_setup(options)
    assert make_setup(dataclasses.replace(options, stage_layers=None))[1] == (5, 1, 5, 1)
    assert setup.stage_layers == (3, 3)
    assert formula(setup, stage_layers).layer_windows == ((17, 17, 17), (17, 17, 0)) * 2
    plan = DESIGN.plans(setup.stage_layers)[0]
    run = Run(tuple(tuple(Event(str(a), 0.0, 1.0, 0.0) for a in row) for row in plan.replicas[0].actions))
    samples = plan_samples(plan, [run], formula(setup, setup.stage_layers).layer_windows)
    assert {(sample.is_first, sample.windows) for sample in samples} == {(True, (17, 17, 17)), (False, (17, 17, 0))}


def test_the_command_writes_a_cost_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_config().save_pretrained(tmp_path / "model")
    output = tmp_path / "cost.json"
    layout = ["--stages", "2", "--layers", "1", "--sequence_parallel", "2"]
    assert main(["profile", str(tmp_path / "model"), str(output), *SIZES, *layout]) == 0
    cost = load_cost(output)
    assert cost.sequence_parallel == 2
    assert cost.all_to_all.latency == 0, "they are part of what the shared stages took"
    assert cost.states == formula(Setup(make_config(), (1, 1), sequence_parallel=2), (1, 1)).states
    assert cost.stage_layers == (1, 1)
    assert cost.forward.chunk > 0
    assert cost.message.latency > 0
    assert cost.optimizer_seconds > 0
    assert not output.with_name("cost.json.partial").exists()
    shown = capsys.readouterr().out
    assert "held-out actions" in shown
    assert f"wrote {output}" in shown


def test_stages_are_measured_undivided_where_cores_lack(tmp_path: Path) -> None:
    make_config().save_pretrained(tmp_path / "model")
    arguments = ["profile", str(tmp_path / "model"), str(tmp_path / "cost.json"), *SIZES, "--stages", "1"]
    assert main([*arguments, "--sequence_parallel", "2", "--threads", str(os.cpu_count())]) == 0
    cost = load_cost(tmp_path / "cost.json")
    assert cost.sequence_parallel == 2
    assert cost.all_to_all.latency > 0


def test_one_process_stands_for_many_stages(tmp_path: Path) -> None:
    make_config().save_pretrained(tmp_path / "model")
    arguments = ["profile", str(tmp_path / "model"), str(tmp_path / "cost.json"), *SIZES, "--processes", "1"]
    assert main([*arguments, "--layers", "1"]) == 0
    cost = load_cost(tmp_path / "cost.json")
    assert cost.stage_layers == (1, 1)
    assert cost.forward.embedding_token == 0
    assert cost.message.latency > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plans", "3"], "plans must be at least 8"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (
            ["--stage_layers", "[2, 1]"],
            "stage_layers [2, 1] must be counts above 0 that add up to the model's 2 layers",
        ),
        (["--stages", "9"], "9 stages are more than the model's 2 layers"),
        (["--stages", "3", "--stage_layers", "[1, 1]"], "stages is 3, but stage_layers [1, 1] names 2"),
        (["--layers", "3"], "layers is 3, but the model has 2"),
        (["--processes", "3"], "processes is 3, but 3 processes of --threads 1 on 2 cores would"),
        (["--processes", "2", "--threads", "2"], "on 2 cores would measure each other's slowness; use at most 1"),
        (["--processes", "2", "--sequence_parallel", "2"], "processes is 2, but 4 processes of --threads 1 on 2 cores"),
    ],
)
def test_refusals_are_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    make_config().save_pretrained(tmp_path / "model")
    assert main(["profile", str(tmp_path / "model"), str(tmp_path / "cost.json"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cost.json").exists()


def test_a_missing_folder_is_named_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_config().save_pretrained(tmp_path / "model")
    assert main(["profile", str(tmp_path / "model"), str(tmp_path / "nowhere" / "cost.json")]) == 2
    shown = capsys.readouterr()
    assert "there is no folder" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("model", "output", "message"),
    [
        ("model", "model", "is a folder; name a file"),
        ("model", "model/config.json", "is a file that is read"),
        ("model/config.json", "model/../model/config.json", "is a file that is read"),
    ],
)
def test_outputs_that_would_lose_something_are_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, output: str, message: str
) -> None:
    make_config().save_pretrained(tmp_path / "model")
    assert main(["profile", str(tmp_path / model), str(tmp_path / output), *SIZES, "--processes", "1"]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "config.json"]
