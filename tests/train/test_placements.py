"""Training with several parts of the model on each stage: the losses of the plain model, checkpoints between placements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from infinipipe.cli.train import read_settings
from infinipipe.plan import load as load_plan
from infinipipe.runtime.pool import WorkerError
from infinipipe.settings import SettingError
from infinipipe.train.convert import export
from infinipipe.train.reference import plain_losses
from infinipipe.train.settings import ParallelSettings, Settings

from .pooled import Record, Workers, change, losses, run, with_parallel

STEPS, SAVED = 4, 2
Layout = tuple[int, int, int]


@dataclass(frozen=True)
class Placed:
    """A layout (replicas, stages, sequence) with its placement, and the schedule that runs on it."""

    layout: Layout
    placement: Literal["plain", "interleaved", "v"]
    stage_layers: list[int]
    schedule: str
    gather_policy: str = "keep"

    def settings(self, settings: Settings, output: Path, **changes: object) -> Settings:
        chosen = change(settings, self.layout, output, **changes)
        chosen = with_parallel(
            chosen, placement=self.placement, stage_layers=self.stage_layers, gather_policy=self.gather_policy
        )
        return replace(chosen, plan=replace(chosen.plan, schedule=self.schedule))


PLAIN = Placed((1, 2, 2), "plain", [2, 1], "zero-bubble")
V = Placed((1, 2, 2), "v", [1, 1, 0, 1], "zero-bubble", "release")
INTERLEAVED = Placed((2, 2, 1), "interleaved", [1, 0, 1, 1], "interleaved")
ALL = {"plain": PLAIN, "v": V, "interleaved": INTERLEAVED}


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def settings(config: Path) -> Settings:
    settings = read_settings([str(config)])[0]
    plan = replace(settings.plan, num_slices=3)
    return replace(settings, data=replace(settings.data, sequences_per_step=8), plan=plan)


@pytest.fixture(scope="module")
def expected(settings: Settings) -> list[float]:
    return plain_losses(settings, STEPS)


@pytest.fixture(scope="module")
def runs(
    pool: Workers, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[Record]]]:
    """A run with every placement, with checkpoints on the way and at the end and a timeline of its first step."""
    done = {}
    for name, placed in ALL.items():
        output = tmp_path_factory.mktemp(name)
        chosen = placed.settings(settings, output, checkpoint_every=SAVED, steps=STEPS, timeline_steps=[1])
        done[name] = (output, run(pool, chosen))
    return done


@pytest.mark.parametrize("name", ALL)
def test_losses_are_the_plain_models(
    runs: dict[str, tuple[Path, list[Record]]], expected: list[float], name: str
) -> None:
    output, records = runs[name]
    assert losses(records) == pytest.approx(expected, abs=1e-4)
    plan = load_plan(output / "timelines" / "step-000001.plan.json")
    assert plan.placement == replace(ParallelSettings(stages=2), placement=ALL[name].placement).placed
    kinds = {action.kind.value for actions in plan.replicas[0].actions for action in actions}
    assert kinds == (set("FIW") if ALL[name].schedule == "zero-bubble" else set("FB"))
    assert list((output / "timelines").glob("step-000001*.svg"))


def test_exported_weights_are_the_same_from_every_placement(
    runs: dict[str, tuple[Path, list[Record]]], tmp_path: Path
) -> None:
    first, *others = [AutoModelForCausalLM.from_pretrained(output / "checkpoint") for output, _ in runs.values()]
    for other in others:
        for (name, ours), theirs in zip(first.named_parameters(), other.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=2e-3), name
    export(runs["v"][0] / "checkpoints" / f"step-{STEPS:08d}", tmp_path / "model")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    v_shaped = AutoModelForCausalLM.from_pretrained(runs["v"][0] / "checkpoint")
    for (name, mine), theirs in zip(converted.named_parameters(), v_shaped.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("name", ["v", "interleaved"])
def test_resuming_with_the_same_placement_is_exact(
    pool: Workers, settings: Settings, runs: dict[str, tuple[Path, list[Record]]], name: str, tmp_path: Path
) -> None:
    output, records = runs[name]
    saved = output / "checkpoints" / f"step-{SAVED:08d}"
    again = run(pool, ALL[name].settings(settings, tmp_path, steps=STEPS, resume=str(saved)))
    for key in ("loss", "gradient_norm", "plan_hash"):
        assert [record[key] for record in again] == [record[key] for record in records[SAVED:]]


@pytest.mark.parametrize(("before", "after"), [("plain", "v"), ("v", "interleaved"), ("interleaved", "plain")])
def test_resuming_with_another_placement_keeps_the_trajectory(
    pool: Workers,
    settings: Settings,
    runs: dict[str, tuple[Path, list[Record]]],
    expected: list[float],
    before: str,
    after: str,
    tmp_path: Path,
) -> None:
    saved = runs[before][0] / "checkpoints" / f"step-{SAVED:08d}"
    records = run(pool, ALL[after].settings(settings, tmp_path, steps=STEPS, resume=str(saved)))
    assert losses(records) == pytest.approx(expected[SAVED:], abs=1e-4)


def test_the_planner_schedules_parts_without_being_told(
    pool: Workers, settings: Settings, expected: list[float], tmp_path: Path
) -> None:
    chosen = replace(V, schedule="auto").settings(settings, tmp_path, stop_after=1)
    chosen = replace(chosen, plan=replace(chosen.plan, planner="elastic", recompute="auto"))
    assert losses(run(pool, chosen)) == pytest.approx(expected[:1], abs=1e-4)


def test_placements_that_cannot_be_are_refused(pool: Workers, settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="the placement v needs at least 2 parts on each stage, not 1"):
        ParallelSettings(stages=2, placement="v", parts_per_stage=1)
    with pytest.raises(SettingError, match="1 part on each stage, not 2; use interleaved or v"):
        ParallelSettings(stages=2, parts_per_stage=2)
    with pytest.raises(
        WorkerError, match="stages is 2, of 2 parts each, but the model has 3 layers; use at most 3 parts"
    ):
        pool.run(with_parallel(change(settings, (1, 2, 2), tmp_path), placement="v"))
    with pytest.raises(WorkerError, match="must name 4 counts that sum to the model's 3 layers"):
        pool.run(with_parallel(change(settings, (1, 2, 2), tmp_path), placement="v", stage_layers=[2, 1]))
    plan = replace(settings.plan, schedule="1f1b")
    with pytest.raises(WorkerError, match="the schedule 1f1b has one part of the model on each stage"):
        pool.run(replace(V.settings(settings, tmp_path), plan=replace(plan, ahead=0)))
