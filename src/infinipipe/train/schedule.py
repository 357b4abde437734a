"""The learning rate's course over the steps of a run. Imports no torch."""

from __future__ import annotations

import math

from infinipipe.train.optimizer_settings import OptimizerSettings


def rate_share(step: int, num_steps: int, settings: OptimizerSettings) -> float:
    """The learning rate of ``step``, counted from 0, as a share of the highest: it rises to 1, then follows its schedule.

    A step after the ``num_steps`` that the schedule is made for has the lowest rate.
    """
    warmup, lowest = settings.warmup_steps, settings.final_share
    if step < warmup:
        return (step + 1) / warmup
    begin, decaying = warmup, max(num_steps - warmup, 1)
    if settings.schedule == "wsd":
        decaying = max(round(settings.decay_share * num_steps), 1)
        begin = max(num_steps - decaying, warmup)
        decaying = max(num_steps - begin, 1)
    progress = min(max(step - begin, 0) / decaying, 1.0)
    match settings.schedule:
        case "constant":
            return 1.0
        case "cosine":
            return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))
        case _:
            return lowest + (1 - lowest) * (1 - progress)


def learning_rate(step: int, num_steps: int, settings: OptimizerSettings) -> float:
    """The learning rate of ``step``, counted from 0, of all parameters to which no group gives another."""
    return settings.learning_rate * rate_share(step, num_steps, settings)


def schedule_remarks(num_steps: int, settings: OptimizerSettings) -> list[str]:
    """What a run of ``num_steps`` does with the schedule that is perhaps not meant."""
    warmup, highest = settings.warmup_steps, settings.learning_rate
    if warmup > num_steps:
        reached = learning_rate(num_steps - 1, num_steps, settings)
        return [
            f"optimizer.warmup_steps is {warmup}, but train.steps is {num_steps}: the learning rate rises to {reached:.3g} only "
            f"and never reaches optimizer.learning_rate, {highest:g}"
        ]
    decaying = round(settings.decay_share * num_steps)
    if settings.schedule == "wsd" and warmup + decaying > num_steps:
        return [
            f"optimizer.warmup_steps is {warmup} and optimizer.decay_share {settings.decay_share:g} of train.steps {num_steps}: "
            f"these overlap, so that the rate decays in the {num_steps - warmup} steps after the warm-up"
        ]
    return []


def change_of_rate(step: int, before: tuple[int, OptimizerSettings], now: tuple[int, OptimizerSettings]) -> str | None:
    """What other settings do to the learning rate of the next step, after ``step`` steps, or ``None`` if nothing.

    Args:
        before, now: ``train.steps`` and the optimizer's settings of the run so far, and of what follows.
    """
    last = learning_rate(step - 1, *before)
    planned, rate = learning_rate(step, *before), learning_rate(step, *now)
    if math.isclose(planned, rate, rel_tol=1e-9):
        return None
    steps = f"train.steps was {before[0]} and is {now[0]}" if before[0] != now[0] else "the settings have changed"
    return (
        f"{steps}: the learning rate of step {step + 1} is {rate:.4g}, where that of step {step} was {last:.4g} and the earlier "
        f"settings would go on with {planned:.4g}"
    )
