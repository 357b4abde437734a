"""Timelines that training leaves of chosen steps, and plans on a measured cost file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infinipipe.cli.main import main
from infinipipe.cli.train import read_settings
from infinipipe.cost import CostError, flop_cost
from infinipipe.cost.files import save_cost
from infinipipe.plan import load as load_plan
from infinipipe.timeline import Source, load
from infinipipe.train.model import model_config
from infinipipe.train.planning import StepPlanner

from .conftest import SHAPE, Finished


def test_chosen_steps_leave_timelines(finished: Finished) -> None:
    folder = finished.output / "timelines"
    kinds = ("html", "measured.json", "plan.json", "predicted.json", "svg")
    files = [f"step-000002.{kind}" for kind in kinds]
    assert sorted(path.name for path in folder.iterdir()) == files
    plan = load_plan(folder / "step-000002.plan.json")
    measured, predicted = (load(folder / f"step-000002.{kind}.json") for kind in ("measured", "predicted"))
    assert (measured.source, predicted.source) == (Source.MEASURED, Source.SIMULATED)
    for timeline in (measured, predicted):
        assert [[span.action for span in row] for row in timeline.spans] == [
            list(row) for row in plan.replicas[0].actions
        ]
    assert predicted.makespan > 0.25
    assert plan.stage_layers == (1, 2)
    (record,) = (record for record in finished.metrics("step") if record["step"] == 2)
    assert record["plan_hash"] == plan.hash
    assert measured.makespan < record["seconds"]
    for stage, peak in enumerate(record["peak_bytes"]):
        states = min(size for _, size in predicted.memory[stage])
        assert max(span.end for span in measured.spans[stage]) <= measured.makespan
        assert measured.peak(stage) == pytest.approx(states + peak)


@pytest.mark.parametrize(
    ("layers", "overrides", "message"),
    [
        ((1, 2), ["--parallel.stage_layers", "[2, 1]"], r"\[1, 2\] layers, but parallel.stage_layers is \[2, 1\]"),
        ((1, 1, 1), [], r"\[1, 1, 1\] layers, but the run has parallel.stages 2 and a model of 3 layers"),
        ((2, 2), [], r"\[2, 2\] layers, but the run has parallel.stages 2 and a model of 3 layers"),
        ((1, 2), ["--parallel.sequence_parallel", "2"], "is of sequence_parallel 1, but the run has 2"),
    ],
)
def test_a_cost_file_of_another_layout_is_refused(
    config: Path, tmp_path: Path, layers: tuple[int, ...], overrides: list[str], message: str
) -> None:
    shape = replace(SHAPE, layers=sum(layers))
    save_cost(flop_cost(shape, layers, element_bytes=4), tmp_path / "cost.json")
    settings, _ = read_settings([str(config), "--plan.cost", str(tmp_path / "cost.json"), *overrides])
    with pytest.raises(CostError, match=message):
        StepPlanner(settings, model_config(settings.model, 300), 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 64}, "whose hidden is 64, but that of the run is 32; profile this model, or remove plan.cost"),
        ({"intermediate": 96}, "intermediate is 96, but that of the run is 64"),
        ({"heads": 8}, "heads is 8, but that of the run is 4"),
        ({"kv_heads": 4}, "kv_heads is 4, but that of the run is 2"),
        ({"head_dim": 16}, "head_dim is 16, but that of the run is 8"),
        ({"vocab": 301}, "vocab is 301, but that of the run is 300"),
        ({"windows": (0, 16)}, "window of layer 1 is 16, but that of the run is 0"),
    ],
)
def test_a_cost_file_of_another_model_is_refused(
    config: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "cost.json"
    cost = flop_cost(replace(SHAPE, **changes), (1, 2), element_bytes=4)
    settings, _ = read_settings([str(config), "--plan.cost", str(path)])
    save_cost(cost, path)
    with pytest.raises(CostError, match=message):
        StepPlanner(settings, model_config(settings.model, 300), 1000)
    save_cost(replace(cost, shape=None), path)
    StepPlanner(settings, model_config(settings.model, 300), 1000)


def test_steps_count_from_one(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config), "--train.timeline_steps", "[0]"]) == 2
    assert "train.timeline_steps must be at least 1" in capsys.readouterr().err
