"""Timelines that training leaves of chosen steps, and plans on a measured cost file."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinipipe.cost import ModelShape, flop_cost
from infinipipe.cost.files import save_cost
from infinipipe.plan import load as load_plan
from infinipipe.timeline import Source, load
from tests.train.conftest import train

SHAPE = ModelShape(layers=3, hidden=32, intermediate=64, heads=4, kv_heads=2, head_dim=8, vocab=300, tied=True)


def test_chosen_steps_leave_timelines(config: Path, tmp_path: Path) -> None:
    cost = flop_cost(SHAPE, (2, 1), element_bytes=4, flops_per_second=1e9, chunk_seconds=0.25)
    save_cost(cost, tmp_path / "cost.json")
    options = ["--train.timeline_steps", "[2]", "--train.stop_after", "2", "--plan.cost", str(tmp_path / "cost.json")]
    done = train(config, *options, "--parallel.stage_layers", "[2, 1]", output="timelines")
    assert done.code == 0, done.err
    folder = done.output / "timelines"
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
    (record,) = (record for record in done.metrics("step") if record["step"] == 2)
    assert record["plan_hash"] == plan.hash
    assert measured.makespan < record["seconds"]
    for stage, peak in enumerate(record["peak_bytes"]):
        states = min(size for _, size in predicted.memory[stage])
        assert max(span.end for span in measured.spans[stage]) <= measured.makespan
        assert measured.peak(stage) == pytest.approx(states + peak)


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        ((1, 2), [], "describes stages of [1, 2] layers, but the run has [2, 1]"),
        ((2, 1), ["--train.timeline_steps", "[0]"], "train.timeline_steps must be at least 1"),
    ],
)
def test_refusals_name_the_setting(
    config: Path, tmp_path: Path, stages: tuple[int, ...], options: list[str], message: str
) -> None:
    save_cost(flop_cost(SHAPE, stages, element_bytes=4), tmp_path / "cost.json")
    layers = ["--parallel.stage_layers", "[2, 1]", "--plan.cost", str(tmp_path / "cost.json")]
    done = train(config, *layers, *options, output="refused")
    assert done.code != 0
    assert message in done.err
