"""From recorded runs to samples of the regression."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from infinipipe.plan import ActionKind, Plan
from infinipipe.profile.fit import Sample
from infinipipe.runtime import Event

Run = Sequence[Sequence[Event]]
"""Events of every stage of one run of a plan."""


def plan_samples(plan: Plan, runs: Sequence[Run], *, on_cpu: bool) -> list[Sample]:
    """One sample for every action of the first replica: the median over ``runs`` of the same plan.

    An action's seconds include those between the action before it and its asking for its input, in which the executor
    works for it. ``on_cpu`` counts those for which its thread ran, so that other programs do not slow the device down.
    """
    replica = plan.replicas[0]
    samples = []
    for stage, actions in enumerate(replica.actions):
        for place, action in enumerate(actions):
            recomputes = action.kind is ActionKind.BACKWARD
            samples.append(
                Sample(
                    kind=action.kind,
                    chunk=replica.chunks[action.chunk],
                    layers=plan.stage_layers[stage],
                    recomputed=replica.recompute[stage][action.chunk] if recomputes else 0,
                    is_first=stage == 0,
                    is_last=stage == plan.num_stages - 1,
                    seconds=statistics.median(_busy(run[stage], place, on_cpu=on_cpu) for run in runs),
                )
            )
    return samples


def _busy(events: Sequence[Event], place: int, *, on_cpu: bool) -> float:
    event = events[place]
    if on_cpu:
        return event.ran
    idle_from = event.start - event.waited
    before = 0.0 if place == 0 else max(0.0, idle_from - events[place - 1].end)
    return event.end - event.start + before


def disturbance(run: Run) -> float:
    """Share of the time of all actions in which their thread did not run: on the CPU, what other programs took."""
    wall = sum(event.end - event.start for row in run for event in row)
    ran = sum(event.ran for row in run for event in row)
    return max(0.0, 1 - ran / wall) if wall else 0.0


def makespan(run: Run) -> float:
    """Seconds from the first start to the last end, on all stages."""
    return max(event.end for row in run for event in row) - min(event.start for row in run for event in row)
