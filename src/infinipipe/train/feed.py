"""What rank 0 feeds to the steps: global batches and their plans, drawn and planned ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from infinipipe.data import BatchSampler, Sequences
from infinipipe.plan import Plan
from infinipipe.planner import PlannerService
from infinipipe.runtime import Batch
from infinipipe.train.planning import StepPlanner
from infinipipe.train.settings import Settings


@dataclass(frozen=True)
class Drawn:
    """A global batch.

    Attributes:
        batch: tokens and labels.
        samples: which of the training sequences.
        position: of the sampler after it.
    """

    batch: Batch
    samples: list[int]
    position: dict[str, Any]


@dataclass(frozen=True)
class Planned:
    """A batch with its plan.

    Attributes:
        drawn: the batch.
        plan: its plan, proved valid.
        planning_seconds: what planning took.
        waited_seconds: how long the step waited for it.
        late: whether a quick plan took the place of one that did not come in time.
    """

    drawn: Drawn
    plan: Plan
    planning_seconds: float
    waited_seconds: float
    late: bool


class Feed:
    """The steps of a run in order, from ``position`` on, as a context manager: it may hold a planning process.

    With ``plan.ahead``, that many steps are drawn and planned while others train.
    """

    def __init__(
        self, sequences: Sequences, settings: Settings, planner: StepPlanner, position: dict[str, Any] | None = None
    ) -> None:
        self.sequences = sequences
        self._planner = planner
        self._batches = draw(sequences, settings, position)
        self._ahead = settings.plan.ahead
        self._service: PlannerService | None = None
        if self._ahead:
            self._service = PlannerService(planner.cost, planner.settings, patience=settings.plan.patience or None)
        self._waiting: deque[tuple[int, Drawn]] = deque()
        self._drawn = 0

    def next(self) -> Planned:
        """The next step. Raises ``PlanError`` and what else refuses a batch."""
        while len(self._waiting) <= self._ahead:
            self._order()
        number, drawn = self._waiting.popleft()
        require_supervised(drawn.batch)
        if self._service is None:
            plan = self._planner.plan(lengths_of(drawn.batch))
            seconds = float(plan.metadata["planning_seconds"])
            return Planned(drawn, plan, seconds, seconds, late=False)
        late = self._service.report.late
        plan = self._service.take(number)
        plan.validate()
        return Planned(
            drawn,
            plan,
            float(plan.metadata["planning_seconds"]),
            self._service.report.waited_seconds[-1],
            late=self._service.report.late > late,
        )

    def _order(self) -> None:
        drawn = next(self._batches)
        if self._service is not None:
            self._service.order(self._drawn, lengths_of(drawn.batch))
        self._waiting.append((self._drawn, drawn))
        self._drawn += 1

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._service is not None:
            self._service.close()


def lengths_of(batch: Batch) -> list[int]:
    """Tokens of every sequence of a batch."""
    return [len(tokens) for tokens in batch.tokens]


def require_supervised(batch: Batch) -> None:
    """Raise ``ValueError`` for a batch from which nothing can be learnt."""
    if batch.num_supervised == 0:
        raise ValueError(
            "a global batch has no token to learn, only prompts or single tokens; raise data.sequences_per_step"
        )


def make_batch(sequences: Sequences, chosen: list[int]) -> Batch:
    """Tokens and labels of the sequences of those indices."""
    return Batch(
        [torch.from_numpy(sequences.tokens(index)) for index in chosen],
        [torch.from_numpy(sequences.labels(index)) for index in chosen],
    )


def draw(sequences: Sequences, settings: Settings, position: dict[str, Any] | None = None) -> Iterator[Drawn]:
    """The global batches of a run, without end, from ``position`` on. Raises ``DataError`` if that is of another run."""
    sampler = BatchSampler(
        sequences.lengths,
        sequences_per_step=settings.data.sequences_per_step,
        tokens_per_step=settings.data.tokens_per_step,
        seed=settings.train.seed,
    )
    if position is not None:
        sampler.load_state_dict(position)
    return _drawn(sequences, sampler)


def _drawn(sequences: Sequences, sampler: BatchSampler) -> Iterator[Drawn]:
    while True:
        chosen = sampler.next()
        yield Drawn(make_batch(sequences, chosen), chosen, sampler.state_dict())
