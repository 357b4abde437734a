"""``elastic``: finer choices than the published method, every one judged by its simulated makespan.

Beyond the number of slices, it chooses how sequences are cut and packed, a ramp of small chunks at both ends of the step, which
shortens the time in which later stages wait for the first chunk and earlier ones for the last, and how far stages run ahead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from infinipipe.plan import Chunk
from infinipipe.plan.ahead import forwards_ahead
from infinipipe.planner.chunking import TokenOverflowError, balanced_chunking, even_chunking, ramp_chunks
from infinipipe.planner.draft import Draft
from infinipipe.planner.paper import search_paper
from infinipipe.planner.registry import register_planner
from infinipipe.planner.search import Found, ReplicaSearch, descend

# What to try. These were picked by hand and never swept: more of anything finds better plans and takes longer. What a change of one
# is worth can be read off benchmarks/planner.py --parts planners scaling: steps over the ideal, and planning times.

Style = Literal["common", "even", "dense"]
"""Algorithm 1, whose borders are common to all sequences; equal slices of each sequence within its token target; the same with the
token capacity as only limit."""

STYLES: tuple[Style, ...] = ("common", "even", "dense")
SCHEDULES: tuple[tuple[str, float], ...] = (
    ("tapered", 2.0),
    ("lookahead", 2.0),
    ("lookahead", 3.0),
    ("lookahead", 1.5),
    ("tapered", 1.0),
    ("lookahead", 1.0),
)
"""Schedules and how many forwards a stage runs ahead for each stage after it."""
SCHEDULES_OF_PARTS: tuple[tuple[str, float], ...] = (("interleaved", 0.0), ("zero-bubble", 0.0))
"""Those for several parts on each stage, which choose themselves how far they run ahead."""
RAMPS = (0.0, 1.0, 2.0, 3.0, 4.0)
"""Chunks of the ramp at each end, per stage."""
MULTIPLES = (8, 6, 4, 3, 2, 1.5)
"""Targets beyond the longest sequence, in multiples of its time."""


@dataclass(frozen=True)
class Choice:
    """One point of the search.

    Attributes:
        slices: the time target as a fraction of the longest sequence: its number of slices, or less than 1.
        style: how sequences are cut and packed.
        ramp: chunks of the ramp at each end, per stage.
        schedule: its name, and how many forwards a stage runs ahead for each stage after it.
    """

    slices: float
    style: Style
    ramp: float
    schedule: tuple[str, float]

    def neighbours(self, schedules: tuple[tuple[str, float], ...]) -> Iterator[Choice]:
        """Choices that differ in one thing other than the number of slices."""
        for ramp in RAMPS:
            yield dataclasses.replace(self, ramp=ramp)
        for schedule in schedules:
            yield dataclasses.replace(self, schedule=schedule)
        for style in STYLES:
            yield dataclasses.replace(self, style=style)


OTHER_STARTS = (Choice(1.0, "dense", 2.0, ("tapered", 1.0)), Choice(1.0, "common", 0.0, ("lookahead", 1.5)))
"""Where the search starts again: choices that are good together and bad one at a time."""
FEW_CHUNKS = 60
"""Chunks up to which it does so; with more, bubbles are small and trying takes longer."""


class ElasticSearch:
    """The search of one replica. Every chunk of every stage has its own recompute variable: sharing them along diagonals, as the
    published method does, makes stages wait less for each other but recomputes about twice as many layers.
    """

    def __init__(self, search: ReplicaSearch) -> None:
        self.search = search
        self.stages = search.cost.placement.num_stages
        self.schedules = SCHEDULES_OF_PARTS if search.has_parts else SCHEDULES
        self._seconds: dict[Choice, float] = {}
        self._chunks: dict[tuple[float, Style, float], tuple[Chunk, ...] | None] = {}

    def run(self) -> Found:
        """Descend over slices, then climb from the best of them, from several starts if chunks are few."""
        search = self.search
        numbers = self.slice_counts()
        roomy = search.settings.memory_budget is None
        best = self.canonical(Choice(1.0, "common", 1.0, self.schedules[0 if roomy else 1]))
        ranked = descend(numbers, lambda number: self.try_slices(best, number), search.limits)
        if not ranked:
            return self.search_least_memory()
        self.climb(dataclasses.replace(best, slices=ranked[0]), numbers)
        if search.best is not None and search.best.draft.table.num_chunks <= FEW_CHUNKS:
            for start in OTHER_STARTS:
                self.climb(dataclasses.replace(start, slices=ranked[0]), numbers)
        return self.best_with_paper()

    def climb(self, start: Choice, numbers: list[float]) -> None:
        """Change one thing at a time for as long as that shortens the step."""
        best, before = self.canonical(start), None
        if not self.take_try(best):
            return
        while best != before:
            before = best
            for choice in map(
                self.canonical, (*best.neighbours(self.schedules), *self.adjacent_slice_counts(best, numbers))
            ):
                if self.take_try(choice) and self.try_choice(choice) < self.try_choice(best):
                    best = choice

    def canonical(self, choice: Choice) -> Choice:
        """The choice itself, or the one that stands for it where the settings or the placement leave no choice of schedule."""
        if self.search.settings.schedule == "auto" and choice.schedule in self.schedules:
            return choice
        return dataclasses.replace(choice, schedule=self.schedules[0])

    def take_try(self, choice: Choice) -> bool:
        """Use up one of the search's tries for a choice that was not tried yet; ``False`` if none is left for it."""
        return choice in self._seconds or self.search.limits.take_try()

    def best_with_paper(self) -> Found:
        """The best of this search and ``elastic-paper``, which has limits of its own. Raises ``BudgetError``."""
        paper, best = self.search.afresh(), self.search.best
        if best is not None and paper.limits.seconds_left <= paper.limits.longest:
            return self.search.refine_best()
        search_paper(paper)
        if paper.best is None or best is None or paper.best.draft.seconds_without_recompute < best.seconds:
            self.search.take_over(paper)
        return self.search.refine_best()

    def search_least_memory(self) -> Found:
        """Nothing fits yet: run no stage ahead, cut as finely as allowed, and then as the published method does."""
        for number in reversed(self.search.slice_counts(most_chunks=math.inf)):
            for schedule in self.schedules if self.search.has_parts else (("lookahead", 1.0), ("lookahead", 0.0)):
                self.try_choice(Choice(number, "common", 0.0, schedule))
        return self.best_with_paper()

    def slice_counts(self) -> list[float]:
        """Time targets to try, coarsest first."""
        search = self.search
        numbers: list[float] = list(search.slice_counts())
        if search.settings.num_slices is not None or numbers[0] > 1:
            return numbers
        room = min(search.capacity, sum(search.lengths[i] for i in search.sequences)) / search.longest
        return [1 / multiple for multiple in MULTIPLES if multiple <= room] + numbers

    def adjacent_slice_counts(self, choice: Choice, numbers: list[float]) -> Iterator[Choice]:
        """The choice with the next coarser and finer target."""
        place = numbers.index(choice.slices)
        for index in (place - 1, place + 1):
            if 0 <= index < len(numbers):
                yield dataclasses.replace(choice, slices=numbers[index])

    def try_slices(self, choice: Choice, number: float) -> float:
        return self.try_choice(dataclasses.replace(choice, slices=number))

    def try_choice(self, choice: Choice) -> float:
        """Simulated seconds of a choice, or of it without recompute if that is too long already; infinite if it does not fit."""
        if choice not in self._seconds:
            self._seconds[choice] = self._evaluate(choice)
        return self._seconds[choice]

    def _evaluate(self, choice: Choice) -> float:
        draft, best = self._draft(choice), self.search.best
        if draft is None:
            return math.inf
        if best is not None and draft.seconds_without_recompute >= best.seconds:
            return draft.seconds_without_recompute
        found = self.search.consider(draft, share_diagonals=False)
        return math.inf if found is None else found.seconds

    def _draft(self, choice: Choice) -> Draft | None:
        chunks = self.chunks(choice.slices, choice.style, choice.ramp)
        name, per_stage = choice.schedule
        warmup = None if self.search.has_parts else forwards_ahead(self.stages, per_stage)
        return None if chunks is None else self.search.draft([chunks], name, warmup)

    def chunks(self, slices: float, style: Style, ramp: float) -> tuple[Chunk, ...] | None:
        """The chunks of a choice in order; ``None`` if a slice would exceed the token capacity."""
        key = (slices, style, ramp)
        if key not in self._chunks:
            self._chunks[key] = self._make_chunks(slices, style, ramp)
        return self._chunks[key]

    def _make_chunks(self, slices: float, style: Style, ramp: float) -> tuple[Chunk, ...] | None:
        search, slice_time = self.search, self.search.slice_time
        target = slice_time(0, search.longest) / slices
        balanced = min(search.capacity, max(1, round(slice_time.length_taking(target))))
        limit = search.capacity if style == "dense" else balanced
        length = round(ramp * self.stages)
        targets = [target * (i + 1) / (length + 1) for i in range(length)]
        shorts = [i for i in search.sequences if slice_time(0, search.lengths[i]) <= target]
        rising, left = ramp_chunks(search.lengths, shorts, targets, slice_time, token_limit=limit)
        falling, left = ramp_chunks(search.lengths, left, targets, slice_time, token_limit=limit)
        kept = set(left)
        rest = [i for i in search.sequences if i in kept or slice_time(0, search.lengths[i]) > target]
        if not rest:
            return (*rising, *reversed(falling))
        if style == "common" and slices >= 1:
            try:
                middle = balanced_chunking(
                    search.lengths, rest, int(slices), slice_time, token_capacity=search.capacity
                )
            except TokenOverflowError:
                return None
        else:
            middle = even_chunking(search.lengths, rest, target, slice_time, token_limit=limit)
        return (*rising, *middle.ordered(), *reversed(falling))


@register_planner("elastic")
def plan_elastic(search: ReplicaSearch) -> Found:
    """Search over :class:`Choice`; never slower than ``elastic-paper``, whose plan is one of those compared."""
    return ElasticSearch(search).run()
