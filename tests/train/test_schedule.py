"""The learning rate's course, against torch's own schedules, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from infinipipe.train.optimizer_settings import OptimizerSettings
from infinipipe.train.schedule import change_of_rate, learning_rate, schedule_remarks

WARMUP, STEPS, LOWEST = 4, 104, 0.1


def settings(**changes: Any) -> OptimizerSettings:
    return OptimizerSettings(**{"learning_rate": 1.0, "warmup_steps": WARMUP, **changes})


def torchs(schedule: str, optimizer: torch.optim.Optimizer) -> list[tuple[LRScheduler, int]]:
    """Torch's schedules after the warm-up, with the steps of each."""
    rest = STEPS - WARMUP
    match schedule:
        case "constant":
            return [(ConstantLR(optimizer, 1.0, 1), rest)]
        case "linear":
            return [(LinearLR(optimizer, 1.0, LOWEST, rest), rest)]
        case "cosine":
            return [(CosineAnnealingLR(optimizer, rest, LOWEST), rest)]
        case _:
            return [(ConstantLR(optimizer, 1.0, 1), rest - 26), (LinearLR(optimizer, 1.0, LOWEST, 26), 26)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_rates_are_those_of_torchs_schedules(schedule: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    parts = [(LinearLR(optimizer, 1 / WARMUP, 1.0, WARMUP - 1), WARMUP), *torchs(schedule, optimizer)]
    ends = [sum(count for _, count in parts[: index + 1]) for index in range(len(parts) - 1)]
    whole = SequentialLR(optimizer, [part for part, _ in parts], ends)
    expected = []
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        whole.step()
    chosen = settings(schedule=schedule, **({"decay_share": 0.25} if schedule == "wsd" else {}))
    assert [learning_rate(step, STEPS, chosen) for step in range(STEPS)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_step_after_the_last_has_the_lowest_rate(schedule: str) -> None:
    assert [learning_rate(step, STEPS, settings(schedule=schedule)) for step in (STEPS, 2 * STEPS)] == [LOWEST] * 2


def test_no_warm_up_and_warm_up_longer_than_the_run() -> None:
    assert learning_rate(0, 10, settings(warmup_steps=0)) == 1.0
    assert learning_rate(2, 3, settings(warmup_steps=10)) == pytest.approx(0.3)
    assert schedule_remarks(10, settings(warmup_steps=10)) == []
    (line,) = schedule_remarks(2, settings(warmup_steps=100))
    assert "optimizer.warmup_steps is 100, but train.steps is 2: the learning rate rises to 0.02 only" in line


def test_a_decay_that_begins_in_the_warm_up_is_said() -> None:
    assert schedule_remarks(10, settings(schedule="wsd", decay_share=0.6)) == []
    (line,) = schedule_remarks(10, settings(schedule="wsd", decay_share=0.7))
    assert "these overlap" in line


def test_what_more_steps_do_to_the_rate_is_said_with_both_values() -> None:
    chosen = settings()
    line = change_of_rate(100, (100, chosen), (200, chosen))
    assert line is not None
    assert line == (
        "train.steps was 100 and is 200: the learning rate of step 101 is 0.5644, where that of step 100 was 0.1002 and the "
        "earlier settings would go on with 0.1"
    )
    assert change_of_rate(100, (100, chosen), (100, chosen)) is None
    constant = settings(schedule="constant")
    assert change_of_rate(100, (100, constant), (200, constant)) is None
    other = change_of_rate(50, (100, chosen), (100, settings(learning_rate=2.0)))
    assert other is not None
    assert other.startswith("the settings have changed: the learning rate of step 51 is 1.1")
