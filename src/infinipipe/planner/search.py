"""The search for one replica's plan: drafts ranked by a quick estimate, the best of them fitted and simulated."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infinipipe.cost import CostModel
from infinipipe.plan import PlanError, ReplicaPlan
from infinipipe.planner.chunking import TokenOverflowError, balanced_chunking
from infinipipe.planner.draft import Draft, sequence_time
from infinipipe.planner.memory import BudgetError, IntArray
from infinipipe.planner.recompute import RecomputeSolution, aggregated_bound
from infinipipe.planner.settings import PlannerSettings


@dataclass(frozen=True)
class Found:
    """A draft with recompute that fits, and its simulated seconds."""

    draft: Draft
    recompute: IntArray
    seconds: float
    solution: RecomputeSolution | None

    @property
    def replica(self) -> ReplicaPlan:
        return self.draft.build(self.recompute)


class Clock:
    """The search's limits: seconds, or a number of tries."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._end = None if settings.time_limit is None else time.monotonic() + settings.time_limit
        self._tries = settings.work_limit

    def spend(self) -> bool:
        """Take one try; ``False`` if none or no time is left."""
        self._tries -= 1
        return self._tries >= 0 and not self.expired

    @property
    def expired(self) -> bool:
        return self._end is not None and time.monotonic() > self._end


def slice_numbers(settings: PlannerSettings) -> list[int]:
    """The ``K`` to try: the given one, or about six for every doubling at most."""
    if settings.num_slices is not None:
        return [settings.num_slices]
    numbers: list[int] = []
    value = 1
    while value <= settings.max_slices:
        numbers.append(value)
        value += max(1, value // 6)
    if numbers[-1] != settings.max_slices:
        numbers.append(settings.max_slices)
    return numbers


def paper_drafts(
    lengths: Sequence[int], sequences: Sequence[int], cost: CostModel, settings: PlannerSettings
) -> list[Draft]:
    """Algorithm 1 for every ``K``, each as one pipeline. Raises ``PlanError`` if no ``K`` respects the token capacity."""
    longest = max(lengths[i] for i in sequences)
    seconds = sequence_time(cost, longest)
    capacity = settings.token_capacity or longest
    drafts: list[Draft] = []
    problem: TokenOverflowError | None = None
    for number in slice_numbers(settings):
        try:
            chunking = balanced_chunking(lengths, sequences, number, seconds, token_capacity=capacity)
        except TokenOverflowError as error:
            problem = error
            continue
        drafts.append(Draft((chunking.ordered(),), cost, settings.schedule))
    if not drafts:
        raise PlanError(f"{problem}; raise token_capacity or the number of slices")
    return drafts


def search(drafts: Iterable[Draft], settings: PlannerSettings, clock: Clock) -> Found:
    """The fastest draft within the budget. Raises ``BudgetError`` with the least memory that would do if none fits."""
    ranked = sorted(((_estimate(draft, settings), i, draft) for i, draft in enumerate(drafts)), key=lambda x: x[:2])
    best: Found | None = None
    nearest: BudgetError | None = None
    for estimate, _, draft in ranked:
        if best is not None and (estimate >= best.seconds or not clock.spend()):
            break
        try:
            recompute, solution = draft.fit(settings.memory_budget, settings.recompute)
        except BudgetError as error:
            if nearest is None or error.required < nearest.required:
                nearest = error
            continue
        seconds = draft.makespan(recompute)
        if best is None or seconds < best.seconds:
            best = Found(draft, recompute, seconds, solution)
    if best is None:
        assert nearest is not None
        raise nearest
    return best


def _estimate(draft: Draft, settings: PlannerSettings) -> float:
    """Seconds that the draft takes at least if recomputed layers cost their time once along a diagonal."""
    seconds = draft.makespan()
    budget = settings.memory_budget
    if budget is None or settings.recompute != "auto" or max(draft.peaks(draft.uniform(0))) <= budget:
        return seconds
    required, _ = draft.least()
    if required > budget:
        return float("inf")
    return seconds + aggregated_bound(draft.problem(budget)) * float(draft.table.layer_recompute.min())
