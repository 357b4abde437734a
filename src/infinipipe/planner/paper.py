"""``elastic-paper``: the method as published."""

from __future__ import annotations

import math
from functools import cache

from infinipipe.plan import Chunk
from infinipipe.planner.chunking import Chunking
from infinipipe.planner.grouping import group, merge_small
from infinipipe.planner.recompute import aggregated_bound
from infinipipe.planner.search import Found, Replica, descend

MOST_CLASSES = 8
"""Classes of sequences that grouping tells apart; with more, the smallest neighbours are joined."""
GROUPED = 2
"""How many of the best slice numbers are tried with several pipelines."""


def plan_paper(problem: Replica) -> Found:
    """Algorithm 1 for several ``K``, grouped into 1F1B pipelines (Eq. 14), with stage-aware recompute (Eq. 16)."""
    search_paper(problem)
    return problem.result()


def search_paper(problem: Replica) -> None:
    """The search of :func:`plan_paper`; what it finds is in ``problem``."""

    def seconds(num_slices: int) -> float:
        found = problem.consider(problem.draft([problem.chunking(num_slices).ordered()]))
        return math.inf if found is None else found.seconds

    numbers = problem.slice_numbers()
    ranked = descend(numbers, seconds, problem.limits)
    if problem.best is not None and not problem.best.recompute.any():
        return
    for num_slices in ranked[:GROUPED] or numbers[-1:]:
        pipelines = group_pipelines(problem, problem.chunking(num_slices))
        if len(pipelines) > 1 and (problem.best is None or problem.limits.spend()):
            problem.consider(problem.draft(pipelines))


def group_pipelines(problem: Replica, chunking: Chunking) -> list[tuple[Chunk, ...]]:
    """The pipelines that Eq. 14 chooses, most finely cut first, with recompute priced by :func:`aggregated_bound`.

    ``delta`` is ``(d_p - 1)`` times the mean forward and backward of a chunk at a stage.
    """
    by_splits = chunking.by_splits()
    splits = sorted(by_splits)
    classes = merge_small([len(by_splits[number]) for number in splits], MOST_CLASSES)

    def chunks(first: int, last: int) -> tuple[Chunk, ...]:
        numbers = splits[classes[first][0] : classes[last - 1][1]]
        return tuple(chunk for number in reversed(numbers) for chunk in by_splits[number])

    table = problem.draft([chunks(0, len(classes))]).table
    stages = table.num_stages
    pipeline_price = (stages - 1) * float(table.forward_backward.mean())
    layer_seconds = float(table.layer_recompute.mean())

    @cache
    def price(first: int, last: int) -> float:
        budget = problem.settings.memory_budget
        if budget is None or problem.settings.recompute != "auto":
            return 0.0
        draft = problem.draft([chunks(first, last)])
        required, _ = draft.least()
        return math.inf if required > budget else aggregated_bound(draft.problem(budget)) * layer_seconds

    groups = group(len(classes), price, pipeline_price)
    return [chunks(first, last) for first, last in reversed(groups)]
