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
from infinipipe.plan.ahead import lead
from infinipipe.planner.chunking import TokenOverflowError, balanced_chunking, even_chunking, ramp_chunks
from infinipipe.planner.draft import Draft
from infinipipe.planner.paper import search_paper
from infinipipe.planner.search import Found, Replica, descend

Style = Literal["mesh", "even", "dense"]
"""Algorithm 1; equal slices of each sequence within its token target; the same with the token capacity as only limit."""

STYLES: tuple[Style, ...] = ("mesh", "even", "dense")
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
        schedule: name and lead.
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


OTHER_STARTS = (Choice(1.0, "dense", 2.0, ("tapered", 1.0)), Choice(1.0, "mesh", 0.0, ("lookahead", 1.5)))
"""Where the search starts again: choices that are good together and bad one at a time."""
FEW_CHUNKS = 60
"""Chunks up to which it does so; with more, bubbles are small and trying takes longer."""


class ElasticSearch:
    """The search of one replica. Every chunk of every stage has its own recompute variable: sharing them along diagonals, as the
    published method does, makes stages wait less for each other but recomputes about twice as many layers.
    """

    def __init__(self, problem: Replica) -> None:
        self.problem = problem
        self.stages = problem.cost.placement.num_stages
        self.schedules = SCHEDULES_OF_PARTS if problem.has_parts else SCHEDULES
        self._seconds: dict[Choice, float] = {}
        self._chunks: dict[tuple[float, Style, float], tuple[Chunk, ...] | None] = {}

    def run(self) -> Found:
        """Descend over slices, then climb from the best of them, from several starts if chunks are few."""
        problem = self.problem
        numbers = self.slice_numbers()
        roomy = problem.settings.memory_budget is None
        best = self.usual(Choice(1.0, "mesh", 1.0, self.schedules[0 if roomy else 1]))
        ranked = descend(numbers, lambda number: self.try_slices(best, number), problem.limits)
        if not ranked:
            return self.leanest()
        self.climb(dataclasses.replace(best, slices=ranked[0]), numbers)
        if problem.best is not None and problem.best.draft.table.num_chunks <= FEW_CHUNKS:
            for start in OTHER_STARTS:
                self.climb(dataclasses.replace(start, slices=ranked[0]), numbers)
        return self.with_paper()

    def climb(self, start: Choice, numbers: list[float]) -> None:
        """Change one thing at a time for as long as that shortens the step."""
        best, before = self.usual(start), None
        while best != before and self.allowed(best):
            before = best
            for choice in map(self.usual, (*best.neighbours(self.schedules), *self.beside(best, numbers))):
                if self.allowed(choice) and self.try_choice(choice) < self.try_choice(best):
                    best = choice

    def usual(self, choice: Choice) -> Choice:
        """The one spelling of choices that a schedule named in the settings, or the placement, makes equal."""
        if self.problem.settings.schedule == "auto" and choice.schedule in self.schedules:
            return choice
        return dataclasses.replace(choice, schedule=self.schedules[0])

    def allowed(self, choice: Choice) -> bool:
        """Whether the choice was tried or may be."""
        return choice in self._seconds or self.problem.limits.spend()

    def with_paper(self) -> Found:
        """The best of this search and ``elastic-paper``, which has limits of its own. Raises ``BudgetError``."""
        paper, best = self.problem.afresh(), self.problem.best
        search_paper(paper)
        if paper.best is None or best is None or paper.best.draft.seconds_without_recompute < best.seconds:
            self.problem.take_over(paper)
        return self.problem.result()

    def leanest(self) -> Found:
        """Nothing fits yet: run no stage ahead, cut as finely as allowed, and then as the published method does."""
        for number in reversed(self.problem.slice_numbers(most_chunks=math.inf)):
            for schedule in self.schedules if self.problem.has_parts else (("lookahead", 1.0), ("lookahead", 0.0)):
                self.try_choice(Choice(number, "mesh", 0.0, schedule))
        return self.with_paper()

    def slice_numbers(self) -> list[float]:
        """Time targets to try, coarsest first."""
        problem = self.problem
        numbers: list[float] = list(problem.slice_numbers())
        if problem.settings.num_slices is not None or numbers[0] > 1:
            return numbers
        room = min(problem.capacity, sum(problem.lengths[i] for i in problem.sequences)) / problem.longest
        return [1 / multiple for multiple in MULTIPLES if multiple <= room] + numbers

    def beside(self, choice: Choice, numbers: list[float]) -> Iterator[Choice]:
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
        draft, best = self._draft(choice), self.problem.best
        if draft is None:
            return math.inf
        if best is not None and draft.seconds_without_recompute >= best.seconds:
            return draft.seconds_without_recompute
        found = self.problem.consider(draft, share_diagonals=False)
        return math.inf if found is None else found.seconds

    def _draft(self, choice: Choice) -> Draft | None:
        chunks = self.chunks(choice.slices, choice.style, choice.ramp)
        name, per_stage = choice.schedule
        warmup = None if self.problem.has_parts else lead(self.stages, per_stage)
        return None if chunks is None else self.problem.draft([chunks], name, warmup)

    def chunks(self, slices: float, style: Style, ramp: float) -> tuple[Chunk, ...] | None:
        """The chunks of a choice in order; ``None`` if a slice would exceed the token capacity."""
        key = (slices, style, ramp)
        if key not in self._chunks:
            self._chunks[key] = self._make_chunks(slices, style, ramp)
        return self._chunks[key]

    def _make_chunks(self, slices: float, style: Style, ramp: float) -> tuple[Chunk, ...] | None:
        problem, time = self.problem, self.problem.time
        target = time(0, problem.longest) / slices
        balanced = min(problem.capacity, max(1, round(time.reach(target))))
        limit = problem.capacity if style == "dense" else balanced
        length = round(ramp * self.stages)
        targets = [target * (i + 1) / (length + 1) for i in range(length)]
        shorts = [i for i in problem.sequences if time(0, problem.lengths[i]) <= target]
        rising, left = ramp_chunks(problem.lengths, shorts, targets, time, token_limit=limit)
        falling, left = ramp_chunks(problem.lengths, left, targets, time, token_limit=limit)
        kept = set(left)
        rest = [i for i in problem.sequences if i in kept or time(0, problem.lengths[i]) > target]
        if not rest:
            return (*rising, *reversed(falling))
        if style == "mesh" and slices >= 1:
            try:
                middle = balanced_chunking(problem.lengths, rest, int(slices), time, token_capacity=problem.capacity)
            except TokenOverflowError:
                return None
        else:
            middle = even_chunking(problem.lengths, rest, target, time, token_limit=limit)
        return (*rising, *middle.ordered(), *reversed(falling))


def plan_elastic(problem: Replica) -> Found:
    """Search over :class:`Choice`; never slower than ``elastic-paper``, whose plan is one of those compared."""
    return ElasticSearch(problem).run()
