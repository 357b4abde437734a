"""Cost models from files: used by the commands like any other, and what is wrong with them is said in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinipipe.cli.plan import PlanOptions
from infinipipe.cli.plan import run as run_plan
from infinipipe.cli.simulate import run as run_simulate
from infinipipe.cost import CostError, preset
from infinipipe.cost.loading import load_model
from infinipipe.plan import Placement, PlanError, load
from infinipipe.settings import SettingError
from infinipipe.simulate import simulate_plan

OWN = """
import dataclasses
from infinipipe.cost import preset
from infinipipe.plan import COLUMNS

class Own:
    def __init__(self, cost, **changes):
        vars(self).update(cost=cost, **changes)

    def __getattr__(self, name):
        return getattr(self.cost, name)

def make(placement):
    cost = preset("7b-a100", placement.num_parts, placement=placement)
    """


def write(folder: Path, body: str = "return Own(cost)") -> str:
    """A cost model in a file of its own; the body of its function begins at line 15."""
    (folder / "mine.py").write_text(f"{OWN}{body}\n")
    return f"{folder / 'mine.py'}:make"


@pytest.mark.parametrize("placement", [Placement.plain(2), Placement.v_shaped(2)])
def test_a_cost_model_from_a_file_is_that_of_the_function(tmp_path: Path, placement: Placement) -> None:
    cost = load_model(write(tmp_path, "return cost"), placement)
    assert cost == preset("7b-a100", placement.num_parts, placement=placement)


@pytest.mark.parametrize("options", [[], ["--placement", "interleaved"]])
def test_the_commands_plan_and_simulate_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    (tmp_path / "lengths.txt").write_text("4000\n300\n")
    name, output = write(tmp_path), str(tmp_path / "plan.json")
    arguments = [str(tmp_path / "lengths.txt"), name, "--stages", "2", "--max_slices", "3", "--output", output]
    assert run_plan([*arguments, *options]) == 0
    plan = load(output)
    (expected,) = simulate_plan(plan, preset("7b-a100", plan.stage_layers, placement=plan.placement))
    assert f"step {expected.makespan:.3f} s" in capsys.readouterr().out
    assert run_simulate([output, name]) == 0
    assert "step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return 3",
            "the cost model .*mine.py:make returns an object of type int without 'stage_layers'; it must have all that",
        ),
        (
            "return preset('7b-a100', 3)",
            r"is of the parts \[\[0\], \[1\], \[2\]\] .*; it must be of .*, \[\[0\], \[1\]\]",
        ),
        ("return 1 / 0", "the cost model .*mine.py:make fails at line 15: ZeroDivisionError"),
        ("return Own(cost, table=lambda chunks: {}[3])", "fails for a chunk of 4 tokens: KeyError: 3"),
        (
            "return Own(cost, table=lambda chunks: dataclasses.replace(cost.table(chunks), seconds=dict.fromkeys(COLUMNS, -1)))",
            "gives as seconds of forward -1.0; its table must have a number of at least 0 for each of 2 parts and 2 chunks",
        ),
    ],
)
def test_what_is_no_cost_model_is_named(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        load_model(write(tmp_path, body), Placement.plain(2))


def test_what_a_cost_model_of_ones_own_does_not_heed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("40\n")
    arguments = [str(tmp_path / "lengths.txt"), write(tmp_path), "--stages", "2"]
    with pytest.raises(
        CostError, match="sequence_parallel is 2, but the cost model .* has its own; omit --sequence_par"
    ):
        run_plan([*arguments, "--sequence_parallel", "2"])
    with pytest.raises(PlanError, match="compare sets planners beside the ideal step, .*; omit --compare"):
        run_plan([*arguments, "--compare", "true"])
    with pytest.raises(SettingError, match="mine.py is a file that is read"):
        PlanOptions("lengths.txt", arguments[1], output=str(tmp_path / "mine.py"))
