"""Planners to compare with: published methods of pipeline parallelism, and the published method with a part taken out.

All search their own chunk size and recompute setting, so that each is compared at its best.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from infinipipe.plan import Chunk, PlanError
from infinipipe.planner.chunking import Chunking
from infinipipe.planner.draft import ADVICE, Draft
from infinipipe.planner.fixed import chunk_sizes, cut_and_pack, equal_times, equal_tokens, terapipe_borders
from infinipipe.planner.memory import BudgetError, IntArray
from infinipipe.planner.paper import plan_paper
from infinipipe.planner.search import Found, Replica
from infinipipe.planner.settings import Recompute


def plan_packed(problem: Replica) -> Found:
    """Batch-level pipeline parallelism: whole sequences packed to the token capacity, 1F1B, uniform recompute."""
    if problem.longest > problem.capacity:
        raise PlanError(
            f"packed-1f1b cannot cut the longest sequence, {problem.longest} tokens, to the token capacity of "
            f"{problem.capacity}; raise token_capacity or use another planner"
        )
    chunking = cut_and_pack(problem.lengths, problem.sequences, lambda length: [], _largest(problem))
    _uniform(problem, [problem.draft([chunking.ordered()])])
    return problem.result()


def plan_fixed_chunk(problem: Replica) -> Found:
    """Fixed-size chunks, cut and packed by tokens, 1F1B, one recompute setting: the "Seq1F1B" of the comparison."""
    _uniform(problem, [problem.draft([_fixed(problem, size).ordered()]) for size in _sizes(problem)])
    return problem.result()


def plan_seq1f1b(problem: Replica) -> Found:
    """Seq1F1B: every long sequence in slices of equal time, its own borders, 1F1B, one recompute setting."""
    drafts = []
    for size in _sizes(problem):
        borders = equal_times(problem.time(0, size), problem.time)
        chunking = cut_and_pack(problem.lengths, problem.sequences, borders, size)
        drafts.append(problem.draft([chunking.ordered()]))
    _uniform(problem, drafts)
    return problem.result()


def plan_gpipe_tokens(problem: Replica) -> Found:
    """TeraPipe: slices by its dynamic program, all forwards then all backwards, one recompute setting."""
    drafts = []
    for size in _sizes(problem):
        borders = terapipe_borders(problem.time(0, size), problem.time, most_tokens=size)
        chunking = cut_and_pack(problem.lengths, problem.sequences, borders, size)
        drafts.append(problem.draft([chunking.ordered()], "gpipe"))
    _uniform(problem, drafts)
    return problem.result()


def plan_chunkflow(problem: Replica) -> Found:
    """ChunkFlow: fixed-size chunks; of a cut sequence the last ``K`` chunks keep activations, the others run forward again."""
    layers = np.array(problem.cost.stage_layers, np.int64)[:, None]
    for size in _sizes(problem):
        draft = problem.draft([_fixed(problem, size).ordered()])
        from_last = np.array([_place_from_last(chunk, size) for chunk in draft.chunks])
        for kept in sorted({*range(1, int(from_last.max()) + 2)}, reverse=True):
            recompute = np.where(from_last >= kept, 1, 0)[None, :] * layers
            if _keep(problem, draft, recompute):
                break
        else:
            _keep(problem, draft, draft.uniform(int(layers.max())))
    return problem.result()


def _place_from_last(chunk: Chunk, size: int) -> int:
    """How many chunks of the same sequence come after this one."""
    piece = chunk.partial
    return 0 if piece is None else -(-(piece.length - piece.stop) // size)


def plan_unbalanced(problem: Replica) -> Found:
    """``elastic-paper`` without balanced chunking: fixed-size chunks under its recompute."""
    for size in _sizes(problem):
        problem.consider(problem.draft([_fixed(problem, size).ordered()]))
    return problem.result()


def with_recompute(mode: Recompute) -> Callable[[Replica], Found]:
    """``elastic-paper`` with one recompute setting throughout."""

    def plan(problem: Replica) -> Found:
        settings = dataclasses.replace(problem.settings, recompute=mode)
        return plan_paper(dataclasses.replace(problem, settings=settings))

    return plan


def _sizes(problem: Replica) -> list[int]:
    return chunk_sizes(problem.longest, _largest(problem), problem.settings.max_slices)


def _largest(problem: Replica) -> int:
    """The largest fixed size: the token capacity, or the longest sequence without one."""
    return problem.settings.token_capacity or problem.longest


def _fixed(problem: Replica, size: int) -> Chunking:
    return cut_and_pack(problem.lengths, problem.sequences, equal_tokens(size), size)


def _uniform(problem: Replica, drafts: Sequence[Draft]) -> None:
    """Consider each draft with the fewest recomputed layers per stage, the same for all chunks, that fit."""
    mode, budget = problem.settings.recompute, problem.settings.memory_budget
    for draft in drafts:
        if mode != "auto" or budget is None:
            problem.consider(draft)
            continue
        low, high = 0, max(problem.cost.stage_layers)
        while low < high:
            middle = (low + high) // 2
            if max(draft.peaks(draft.uniform(middle))) <= budget:
                high = middle
            else:
                low = middle + 1
        _keep(problem, draft, draft.uniform(low))


def _keep(problem: Replica, draft: Draft, recompute: IntArray) -> bool:
    """Consider a draft with a given recompute; ``False`` if it does not fit."""
    budget = problem.settings.memory_budget
    peaks = draft.peaks(recompute)
    worst = int(np.argmax(peaks))
    if budget is not None and peaks[worst] > budget:
        problem.reject(BudgetError(math.ceil(peaks[worst]), budget, worst, ADVICE))
        return False
    problem.accept(Found(draft, recompute, draft.makespan(recompute), None))
    return True
