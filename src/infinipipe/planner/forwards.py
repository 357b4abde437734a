"""Plans of which only the forwards are run, for evaluation: nothing waits for a backward, so that far less memory will do."""

from __future__ import annotations

from collections.abc import Sequence

from infinipipe.cost import CostModel
from infinipipe.plan import Chunk, Pipeline, Plan, build_replica
from infinipipe.planner.chunking import SliceTime, even_chunking
from infinipipe.planner.draft import fit_slice_time
from infinipipe.planner.memory import BudgetError
from infinipipe.planner.replicas import split_by_time
from infinipipe.planner.settings import PlannerSettings

MESSAGES = 3
"""Buffers of messages at once: one received ahead, one that is worked on, one on its way out."""


def plan_forwards(lengths: Sequence[int], cost: CostModel, settings: PlannerSettings) -> Plan:
    """A plan of ``lengths`` whose forwards fit the memory budget; its backwards, which are never run, may not.

    Sequences are packed up to the token capacity, or to the longest sequence if there is none, and cut where they exceed it; chunks are
    halved until they fit. Raises ``BudgetError`` if those of one token do not, as where the keys and values of a
    sequence are too much alone.
    """
    slice_time, longest = fit_slice_time(cost, max(lengths)), max(lengths)
    parts = split_by_time(lengths, settings.replicas, slice_time)
    limit = min(settings.token_capacity or longest, longest)
    while True:
        chunks = [_chunks(lengths, part, slice_time, limit) for part in parts]
        peaks = [[_peak(each, cost, stage) for stage in range(cost.placement.num_stages)] for each in chunks]
        worst, stage = max((peak, stage) for row in peaks for stage, peak in enumerate(row))
        budget = settings.memory_budget
        if budget is None or worst <= budget:
            break
        if limit == 1:
            raise BudgetError(
                worst, budget, stage, "use more stages, raise memory_budget or evaluate shorter sequences"
            )
        limit = max(1, limit // 2)
    schedule = "gpipe" if cost.placement.num_parts == cost.placement.num_stages else "interleaved"
    replicas = [build_replica([Pipeline(each)] if each else [], cost.placement, schedule=schedule) for each in chunks]
    return Plan(tuple(cost.stage_layers), tuple(lengths), tuple(replicas))


def _chunks(lengths: Sequence[int], part: Sequence[int], slice_time: SliceTime, limit: int) -> tuple[Chunk, ...]:
    if not part:
        return ()
    target = slice_time(0, limit)
    return even_chunking(lengths, part, target, slice_time, token_limit=limit).ordered()


def _peak(chunks: Sequence[Chunk], cost: CostModel, stage: int) -> int:
    """The most bytes that a stage holds in forwards that no backward follows."""
    most = 0
    for chunk in chunks:
        piece = chunk.partial
        stored = 0 if piece is None else sum(cost.kv_bytes(piece.length, part) for part in cost.placement.parts[stage])
        for part in cost.placement.parts[stage]:
            # Whatever is recomputed in a backward is not kept: a layer's working set comes and goes.
            needed = cost.transient_bytes("forward", chunk, part, cost.stage_layers[part])
            most = max(most, stored + needed)
    messages = MESSAGES * max((cost.message_bytes(chunk.num_tokens) for chunk in chunks), default=0)
    return cost.state_bytes(stage) + most + messages
