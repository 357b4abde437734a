"""``elastic-paper``: the method as published."""

from __future__ import annotations

import math
from functools import cache

from infinipipe.plan import Chunk
from infinipipe.planner.chunking import Chunking
from infinipipe.planner.grouping import group, merge_small
from infinipipe.planner.recompute import aggregated_bound
from infinipipe.planner.registry import register_planner
from infinipipe.planner.search import Found, ReplicaSearch, descend

MOST_CLASSES = 8
"""Classes of sequences that grouping tells apart; with more, the smallest neighbours are joined."""
GROUPED = 2
"""How many of the best slice numbers are tried with several pipelines."""


@register_planner("elastic-paper")
def plan_paper(search: ReplicaSearch) -> Found:
    """Algorithm 1 for several ``K``, grouped into 1F1B pipelines (Eq. 14), with stage-aware recompute (Eq. 16)."""
    search_paper(search)
    return search.refine_best()


def search_paper(search: ReplicaSearch) -> None:
    """The search of :func:`plan_paper`; what it finds is in ``search``."""

    def seconds(num_slices: int) -> float:
        found = search.consider(search.draft([search.chunking(num_slices).ordered()]))
        return math.inf if found is None else found.seconds

    numbers = search.slice_counts()
    ranked = descend(numbers, seconds, search.limits)
    if search.best is not None and not search.best.recompute.any():
        return
    for num_slices in ranked[:GROUPED] or numbers[-1:]:
        if search.best is not None and search.limits.seconds_left <= search.limits.longest:
            return
        pipelines = group_pipelines(search, search.chunking(num_slices))
        if len(pipelines) > 1 and (search.best is None or search.limits.take_try()):
            search.consider(search.draft(pipelines))


def group_pipelines(search: ReplicaSearch, chunking: Chunking) -> list[tuple[Chunk, ...]]:
    """The pipelines that Eq. 14 chooses, most finely cut first, with recompute priced by :func:`aggregated_bound`.

    ``delta`` is ``(d_p - 1)`` times the mean forward and backward of a chunk at a stage.
    """
    by_splits = chunking.by_splits()
    splits = sorted(by_splits)
    classes = merge_small([len(by_splits[number]) for number in splits], MOST_CLASSES)

    def chunks(first: int, last: int) -> tuple[Chunk, ...]:
        numbers = splits[classes[first][0] : classes[last - 1][1]]
        return tuple(chunk for number in reversed(numbers) for chunk in by_splits[number])

    table = search.draft([chunks(0, len(classes))]).table
    stages = table.num_stages
    pipeline_price = (stages - 1) * float(table.forward_backward.mean())
    layer_seconds = float(table.layer_recompute.mean())

    @cache
    def price(first: int, last: int) -> float:
        budget = search.settings.memory_budget
        if budget is None or search.settings.recompute != "auto":
            return 0.0
        draft = search.draft([chunks(first, last)])
        required, _ = draft.least()
        return math.inf if required > budget else aggregated_bound(draft.problem(budget)) * layer_seconds

    groups = group(len(classes), price, pipeline_price)
    return [chunks(first, last) for first, last in reversed(groups)]
