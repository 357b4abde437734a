"""Planners to compare with: published methods of pipeline parallelism, and the published method with a part taken out.

All search their own chunk size and recompute setting, so that each is compared at its best.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from infinipipe.plan import Chunk, PlanError
from infinipipe.planner.baselines.cutting import chunk_sizes, cut_and_pack, equal_times, equal_tokens, terapipe_borders
from infinipipe.planner.chunking import Chunking
from infinipipe.planner.draft import ADVICE, Draft
from infinipipe.planner.memory import BudgetError, IntArray
from infinipipe.planner.paper import plan_paper
from infinipipe.planner.registry import register_planner
from infinipipe.planner.search import Found, ReplicaSearch
from infinipipe.planner.settings import Recompute


@register_planner("packed-1f1b")
def plan_packed(search: ReplicaSearch) -> Found:
    """Batch-level pipeline parallelism: whole sequences packed to the token capacity, 1F1B, uniform recompute."""
    if search.longest > search.capacity:
        raise PlanError(
            f"packed-1f1b cannot cut the longest sequence, {search.longest} tokens, to the token capacity of "
            f"{search.capacity}; raise token_capacity or use another planner"
        )
    chunking = cut_and_pack(search.lengths, search.sequences, lambda length: [], _largest(search))
    _uniform(search, [search.draft([chunking.ordered()])])
    return search.refine_best()


@register_planner("fixed-chunk")
def plan_fixed_chunk(search: ReplicaSearch) -> Found:
    """Fixed-size chunks, cut and packed by tokens, 1F1B, one recompute setting: the "Seq1F1B" of the comparison."""
    _uniform(search, [search.draft([_fixed(search, size).ordered()]) for size in _sizes(search)])
    return search.refine_best()


@register_planner("seq1f1b")
def plan_seq1f1b(search: ReplicaSearch) -> Found:
    """Seq1F1B: every long sequence in slices of equal time, its own borders, 1F1B, one recompute setting."""
    drafts = []
    for size in _sizes(search):
        borders = equal_times(search.slice_time(0, size), search.slice_time)
        chunking = cut_and_pack(search.lengths, search.sequences, borders, size)
        drafts.append(search.draft([chunking.ordered()]))
    _uniform(search, drafts)
    return search.refine_best()


@register_planner("gpipe-tokens")
def plan_gpipe_tokens(search: ReplicaSearch) -> Found:
    """TeraPipe: slices by its dynamic program, all forwards then all backwards, one recompute setting."""
    drafts = []
    for size in _sizes(search):
        borders = terapipe_borders(search.slice_time(0, size), search.slice_time, most_tokens=size)
        chunking = cut_and_pack(search.lengths, search.sequences, borders, size)
        drafts.append(search.draft([chunking.ordered()], "gpipe"))
    _uniform(search, drafts)
    return search.refine_best()


@register_planner("chunkflow")
def plan_chunkflow(search: ReplicaSearch) -> Found:
    """ChunkFlow: fixed-size chunks; of a cut sequence the last ``K`` chunks keep activations, the others run forward again."""
    layers = np.array(search.cost.stage_layers, np.int64)[:, None]
    for size in _sizes(search):
        draft = search.draft([_fixed(search, size).ordered()])
        from_last = np.array([_place_from_last(chunk, size) for chunk in draft.chunks])
        for kept in sorted({*range(1, int(from_last.max()) + 2)}, reverse=True):
            recompute = np.where(from_last >= kept, 1, 0)[None, :] * layers
            if _keep(search, draft, recompute):
                break
        else:
            _keep(search, draft, draft.uniform(int(layers.max())))
    return search.refine_best()


def _place_from_last(chunk: Chunk, size: int) -> int:
    """How many chunks of the same sequence come after this one."""
    piece = chunk.partial
    return 0 if piece is None else -(-(piece.length - piece.stop) // size)


@register_planner("paper-unbalanced")
def plan_unbalanced(search: ReplicaSearch) -> Found:
    """``elastic-paper`` without balanced chunking: fixed-size chunks under its recompute."""
    for size in _sizes(search):
        search.consider(search.draft([_fixed(search, size).ordered()]))
    return search.refine_best()


def with_recompute(mode: Recompute) -> Callable[[ReplicaSearch], Found]:
    """``elastic-paper`` with one recompute setting throughout."""

    def plan(search: ReplicaSearch) -> Found:
        settings = dataclasses.replace(search.settings, recompute=mode)
        return plan_paper(dataclasses.replace(search, settings=settings))

    return plan


register_planner("paper-no-recompute")(with_recompute("none"))
register_planner("paper-full-recompute")(with_recompute("all"))


def _sizes(search: ReplicaSearch) -> list[int]:
    return chunk_sizes(search.longest, _largest(search), search.settings.max_slices)


def _largest(search: ReplicaSearch) -> int:
    """The largest fixed size: the token capacity, or the longest sequence without one."""
    return search.settings.token_capacity or search.longest


def _fixed(search: ReplicaSearch, size: int) -> Chunking:
    return cut_and_pack(search.lengths, search.sequences, equal_tokens(size), size)


def _uniform(search: ReplicaSearch, drafts: Sequence[Draft]) -> None:
    """Consider each draft with the fewest recomputed layers per stage, the same for all chunks, that fit."""
    mode, budget = search.settings.recompute, search.settings.memory_budget
    for draft in drafts:
        if mode != "auto" or budget is None:
            search.consider(draft)
            continue
        low, high = 0, max(search.cost.stage_layers)
        while low < high:
            middle = (low + high) // 2
            if max(draft.peaks(draft.uniform(middle))) <= budget:
                high = middle
            else:
                low = middle + 1
        _keep(search, draft, draft.uniform(low))


def _keep(search: ReplicaSearch, draft: Draft, recompute: IntArray) -> bool:
    """Consider a draft with a given recompute; ``False`` if it does not fit."""
    budget = search.settings.memory_budget
    peaks = draft.peaks(recompute)
    worst = int(np.argmax(peaks))
    if budget is not None and peaks[worst] > budget:
        search.reject(BudgetError(math.ceil(peaks[worst]), budget, worst, ADVICE))
        return False
    search.accept(Found(draft, recompute, draft.makespan(recompute), None))
    return True
