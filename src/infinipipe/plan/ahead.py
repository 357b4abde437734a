"""Schedules that run further ahead than 1F1B where that hides delays, and hold fewer chunks where it does not.

Both are read off the last stage's need: before the backward at position ``j`` of the backward order it must have computed
``need[j]`` forwards. 1F1B gives a stage one forward more than the stage after it, so that every difference between two
chunks' times stops all stages; two absorb it. It also keeps as many chunks in flight as the most finely cut sequence needs to the end
of the pipeline, though later sequences need less.

Their ``warmup`` is, for every stage, how many forwards it runs ahead of the last stage's need; two for each later stage if not given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infinipipe.plan.placement import Placement
from infinipipe.plan.program import Integers
from infinipipe.plan.schedules import backward_order, register_schedule, require_one_part
from infinipipe.plan.types import Action, Backward, Chunk, Forward, cut_sequences

PER_STAGE = 2
"""Forwards that a stage runs ahead for each stage after it, unless a planner says."""


def forwards_ahead(num_stages: int, per_stage: float) -> tuple[int, ...]:
    """How far every stage runs ahead: ``per_stage`` forwards for each stage after it, rounded up."""
    return tuple(int(np.ceil(per_stage * (num_stages - 1 - stage))) for stage in range(num_stages))


@register_schedule("tapered")
def tapered(
    pipelines: Sequence[Sequence[Chunk]], placement: Placement, warmup: Sequence[int] | None = None
) -> list[list[Action]]:
    """Forwards and backwards in turn, with ever fewer chunks in flight: as many as the most finely cut sequence still to come asks for."""
    require_one_part(placement, "tapered")
    chunks = [chunk for pipeline in pipelines for chunk in pipeline]
    order = backward_order(chunks)
    splits = {index: len(places) for places in cut_sequences(chunks).values() for index in places}
    own = np.array([splits.get(index, 1) for index in order], np.int64)
    depth = np.maximum.accumulate(own[::-1])[::-1]
    before = np.maximum.accumulate(np.maximum(np.arange(len(order)) + depth, _need(order)))
    ahead = warmup if warmup is not None else forwards_ahead(placement.num_stages, PER_STAGE)
    return _interleave(order, [before + extra for extra in ahead])


@register_schedule("lookahead")
def lookahead(
    pipelines: Sequence[Sequence[Chunk]], placement: Placement, warmup: Sequence[int] | None = None
) -> list[list[Action]]:
    """Forwards as late as the last stage's need a few backwards ahead allows: the least memory of these schedules."""
    require_one_part(placement, "lookahead")
    chunks = [chunk for pipeline in pipelines for chunk in pipeline]
    order = backward_order(chunks)
    need = _need(order)
    ahead = warmup if warmup is not None else forwards_ahead(placement.num_stages, PER_STAGE)
    places = np.arange(len(order))
    return _interleave(order, [need[np.minimum(places + extra, len(order) - 1)] for extra in ahead])


def _need(order: Sequence[int]) -> Integers:
    """Forwards that must precede the backward at each position."""
    need: Integers = np.maximum.accumulate(np.array(order, np.int64) + 1)
    return need


def _interleave(order: Sequence[int], before: Sequence[Integers]) -> list[list[Action]]:
    """Action lists with ``before[stage][j]`` forwards ahead of the backward at position ``j``, ascending in ``j``."""
    count = len(order)
    forwards = [Forward(index) for index in range(count)]
    backwards = [Backward(index) for index in order]
    lists = []
    for targets in before:
        actions: list[Action] = []
        done = 0
        for backward, target in zip(backwards, np.minimum(targets, count).tolist(), strict=True):
            actions += forwards[done:target]
            done = max(done, target)
            actions.append(backward)
        lists.append(actions)
    return lists
