"""What all planners share: the search for one replica's plan with its chunkings, its limits, and the descent over slice counts."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from infinipipe.cost import CostModel
from infinipipe.plan import Chunk, PlanError, ReplicaPlan
from infinipipe.planner.chunking import Chunking, SliceTime, balanced_borders, balanced_chunking
from infinipipe.planner.draft import Draft, fit_slice_time
from infinipipe.planner.memory import BudgetError, IntArray
from infinipipe.planner.recompute import RecomputeSolution
from infinipipe.planner.settings import PlannerSettings
from infinipipe.planner.solvers import close_gap

MOST_CHUNKS = 2000
"""Chunks beyond which finer cutting is tried only if nothing else fits."""


@dataclass(frozen=True)
class Found:
    """A draft with recompute that fits, and its simulated seconds."""

    draft: Draft
    recompute: IntArray
    seconds: float
    solution: RecomputeSolution | None
    share_diagonals: bool = True

    @property
    def replica(self) -> ReplicaPlan:
        return self.draft.build(self.recompute)


@dataclass
class Limits:
    """A search's limits: the moment at which it ends, and how many drafts it may still try.

    Attributes:
        end: that moment, by ``time.monotonic``.
        tries: those that are left.
        longest: seconds of the longest try so far, which the next one may take as well.
    """

    end: float
    tries: int
    longest: float = 0.0
    _began: float | None = None

    @property
    def seconds_left(self) -> float:
        """Until the end; infinite without a time limit."""
        return max(self.end - time.monotonic(), 0.0)

    def take_try(self) -> bool:
        """Use up one of the tries that are left; ``False`` if none, or too little time, is left."""
        now = time.monotonic()
        if self._began is not None:
            self.longest, self._began = max(self.longest, now - self._began), None
        if self.tries <= 0 or now + self.longest >= self.end:
            return False
        self.tries, self._began = self.tries - 1, now
        return True


@dataclass
class ReplicaSearch:
    """The search for one replica's plan: its sequences, what planning them asks for, and the best plan so far.

    A planner makes drafts (:meth:`draft`), has each fitted into the budget and judged (:meth:`consider`), and returns the best with
    its recompute refined (:meth:`refine_best`).

    Attributes:
        lengths: tokens of all sequences of the global batch.
        sequences: those of this replica.
        cost, settings: as given to :func:`infinipipe.planner.plan_step`.
        limits: of the search.
        best: the fastest plan so far.
        slice_time: seconds of a slice of any sequence, all stages together.
    """

    lengths: Sequence[int]
    sequences: Sequence[int]
    cost: CostModel
    settings: PlannerSettings
    limits: Limits
    best: Found | None = None
    _nearest: BudgetError | None = None
    _chunkings: dict[int, Chunking] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slice_time: SliceTime = fit_slice_time(self.cost, self.longest)

    def afresh(self) -> ReplicaSearch:
        """A search of the same replica without a plan yet and with all its tries; time runs on and chunkings are shared."""
        limits = Limits(self.limits.end, self.settings.work_limit, self.limits.longest)
        return dataclasses.replace(self, limits=limits, best=None, _nearest=None)

    @property
    def has_parts(self) -> bool:
        """Whether a stage has several parts of the model."""
        return self.cost.placement.num_parts > self.cost.placement.num_stages

    @property
    def longest(self) -> int:
        return max(self.lengths[i] for i in self.sequences)

    @property
    def capacity(self) -> int:
        """Most tokens of a chunk."""
        return self.settings.token_capacity or max(sum(self.lengths[i] for i in self.sequences), 1)

    def chunking(self, num_slices: int) -> Chunking:
        """Algorithm 1 with a usable ``num_slices``."""
        if num_slices not in self._chunkings:
            self._chunkings[num_slices] = balanced_chunking(
                self.lengths, self.sequences, num_slices, self.slice_time, token_capacity=self.capacity
            )
        return self._chunkings[num_slices]

    def slice_counts(self, *, most_chunks: float = MOST_CHUNKS) -> list[int]:
        """The ``K`` to try, ascending: the given one, or about six for every doubling that make about ``most_chunks`` at most.

        Raises ``PlanError`` if none will do.
        """
        settings = self.settings
        numbers = [settings.num_slices] if settings.num_slices is not None else _spread(settings.max_slices)
        longest = sum(self.slice_time(0, self.lengths[i]) for i in self.sequences) / self.slice_time(0, self.longest)
        usable: list[int] = []
        for number in numbers:
            if (number * longest <= most_chunks or not usable) and self._first_slice(number) <= self.capacity:
                usable.append(number)
        if not usable:
            raise PlanError(
                f"{numbers[-1]} slices of the longest sequence, {self.longest} tokens, start with one of "
                f"{self._first_slice(numbers[-1])} tokens, more than the token_capacity of {self.capacity}; raise "
                "token_capacity or the number of slices"
            )
        return usable

    def _first_slice(self, num_slices: int) -> int:
        """Tokens of the longest sequence's first slice, the token target of Algorithm 1."""
        return (balanced_borders(self.longest, num_slices, self.slice_time) or [self.longest])[0]

    def draft(
        self, pipelines: Sequence[Sequence[Chunk]], schedule: str | None = None, warmup: tuple[int, ...] | None = None
    ) -> Draft:
        """Pipelines of chunks under the settings' schedule; if that is ``auto``, under the given one, or 1F1B.

        1F1B over several parts on each stage is ``interleaved``. Raises ``PlanError`` if there are no chunks.
        """
        if not any(pipelines):
            raise PlanError("a draft needs at least one chunk")
        if self.settings.schedule != "auto":
            schedule, warmup = self.settings.schedule, None
        default = "interleaved" if self.has_parts else "1f1b"
        return Draft(tuple(map(tuple, pipelines)), self.cost, schedule or default, warmup)

    def consider(self, draft: Draft, *, share_diagonals: bool = True) -> Found | None:
        """Fit the draft into the budget and keep it if it is the fastest so far; ``None`` if it does not fit."""
        budget, mode = self.settings.memory_budget, self.settings.recompute
        try:
            recompute, solution = draft.fit(budget, mode, share_diagonals=share_diagonals)
        except BudgetError as error:
            self.reject(error)
            return None
        return self.accept(Found(draft, recompute, draft.makespan(recompute), solution, share_diagonals))

    def accept(self, found: Found) -> Found:
        """Keep a plan that fits if it is the fastest so far."""
        if self.best is None or found.seconds < self.best.seconds:
            self.best = found
        return found

    def reject(self, error: BudgetError) -> None:
        """Remember what a draft that does not fit would need."""
        if self._nearest is None or error.required < self._nearest.required:
            self._nearest = error

    def take_over(self, other: ReplicaSearch) -> None:
        """Keep what another search of the same replica has found, if it is better."""
        try:
            self.accept(other.refine_best())
        except BudgetError as error:
            self.reject(error)

    def refine_best(self) -> Found:
        """Improve the recompute of the best plan by the integer program where it may be far from the optimum, and return that plan.

        Raises ``BudgetError``, with the least memory that any draft needed, if none fits, and ``PlanError`` if none was considered.
        """
        if self.best is None:
            raise self._nearest or PlanError("the search has considered no draft, so that there is no plan to return")
        self._close_gap(self.best)
        return self.best

    def _close_gap(self, found: Found) -> None:
        budget = self.settings.memory_budget
        seconds_left = self.limits.seconds_left
        if found.solution is None or budget is None or seconds_left <= self.limits.longest:
            return
        problem = found.draft.problem(budget, share_diagonals=found.share_diagonals)
        solution = close_gap(problem, found.solution, seconds=seconds_left)
        recompute = problem.layers(solution.values)
        seconds = found.draft.makespan(recompute)
        if seconds <= found.seconds:
            self.best = dataclasses.replace(found, recompute=recompute, seconds=seconds, solution=solution)
        else:
            self.best = dataclasses.replace(found, solution=dataclasses.replace(found.solution, bound=solution.bound))


Scale = TypeVar("Scale", int, float)


def _spread(most: int) -> list[int]:
    numbers, value = [], 1
    while value < most:
        numbers.append(value)
        value += max(1, value // 6)
    return [*numbers, most]


def descend(numbers: Sequence[Scale], seconds: Callable[[Scale], float], limits: Limits) -> list[Scale]:
    """Search ascending ``numbers`` for the least ``seconds``; returns those tried that are finite, best first.

    Every third is tried, then the neighbours of the best until none is better. If none of these is finite, all are tried from
    the highest. At least one number is tried whatever the limits.
    """
    tried: dict[int, float] = {}

    def attempt(index: int) -> None:
        if not 0 <= index < len(numbers) or index in tried:
            return
        is_allowed = limits.take_try()
        if is_allowed or not tried:
            tried[index] = seconds(numbers[index])

    for index in range(len(numbers) - 1, -1, -3):
        attempt(index)
    if not any(map(math.isfinite, tried.values())):
        for index in range(len(numbers) - 1, -1, -1):
            attempt(index)
    moved = True
    while moved:
        best = min(tried, key=tried.__getitem__)
        before = len(tried)
        for index in (best - 1, best + 1):
            attempt(index)
        moved = len(tried) > before
    finite = [index for index, value in tried.items() if math.isfinite(value)]
    return [numbers[index] for index in sorted(finite, key=tried.__getitem__)]
