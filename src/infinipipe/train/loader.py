"""The data loader of a training run: global batches, drawn and planned ahead of the steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from infinipipe.data import Batches, Corpus, Sample, tokens_by_source
from infinipipe.plan import Plan, from_json, to_json
from infinipipe.planner import PlannerService
from infinipipe.runtime import Batch
from infinipipe.train.planning import StepPlanner
from infinipipe.train.settings import Settings


@dataclass(frozen=True)
class SampledBatch:
    """A global batch.

    Attributes:
        batch: tokens and labels.
        samples: the sequences that it is made of.
        position: where the data stand behind it.
    """

    batch: Batch
    samples: list[Sample]
    position: dict[str, Any]


@dataclass(frozen=True)
class PlannedBatch:
    """A global batch with its plan: what every process needs for a pass over it.

    Pickled, its plan is JSON, so that all processes run what a plan file would say, and all tokens and labels are one int32 array, all
    weights another: thousands of int64 tensors, pickled one by one, would take about a second.
    """

    batch: Batch
    plan: Plan

    def __getstate__(self) -> dict[str, Any]:
        flat = torch.cat([*self.batch.tokens, *self.batch.labels]).to(torch.int32)
        weights = None if self.batch.weights is None else torch.cat(list(self.batch.weights)).numpy()
        return self.__dict__ | {"batch": (flat.numpy(), weights), "plan": to_json(self.plan)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        plan = from_json(state["plan"])
        content, weighed = state["batch"]
        flat = torch.from_numpy(content).to(torch.int64).view(2, plan.num_tokens)
        tokens, labels = (row.split(list(plan.lengths)) for row in flat)
        weights = None if weighed is None else torch.from_numpy(weighed).split(list(plan.lengths))
        self.__dict__.update(state, batch=Batch(tokens, labels, weights), plan=plan)


@dataclass(frozen=True)
class TrainingBatch(PlannedBatch):
    """The planned batch of a training step.

    Attributes:
        sources: tokens that each source of the corpus gives.
        position: where the data stand behind it.
        planning_seconds: what planning took.
        waited_seconds: how long the step waited for the plan.
        late: whether a quick plan took the place of one that did not come in time.
        data_seconds: how long the step waited for sequences to be drawn.
    """

    sources: dict[str, int]
    position: dict[str, Any]
    planning_seconds: float
    waited_seconds: float
    late: bool
    data_seconds: float


class DataLoader:
    """The batches of a run in order, from ``position`` on, as a context manager: it may hold a planning process.

    With ``plan.ahead``, that many batches are drawn and planned while others train.

    Args:
        rows: of the model's embedding.

    Attributes:
        remarks: lines for the log on how it goes on from ``position``.
        samples: the sequences of the last batch that was taken.

    Raises ``DataError`` if ``position`` is of another corpus.
    """

    def __init__(
        self,
        corpus: Corpus,
        settings: Settings,
        planner: StepPlanner,
        position: dict[str, Any] | None = None,
        *,
        rows: int,
    ) -> None:
        self._corpus, self._rows = corpus, rows
        self._planner = planner
        self._batches = corpus.batches(settings.data, settings.train.seed)
        self.remarks = [] if position is None else self._batches.load_state_dict(position)
        self.samples: list[Sample] = []
        self._ahead = settings.plan.ahead
        self._service: PlannerService | None = None
        if self._ahead:
            self._service = PlannerService(planner.cost, planner.settings, patience=settings.plan.patience or None)
        self._waiting: deque[tuple[int, SampledBatch]] = deque()
        self._drawn = 0

    def next(self) -> TrainingBatch:
        """The next batch, its plan proved valid. Raises ``PlanError`` and what else refuses a batch."""
        began = time.perf_counter()
        while len(self._waiting) <= self._ahead:
            self._order()
        drawing = time.perf_counter() - began
        number, sampled = self._waiting.popleft()
        require_supervised(sampled.batch)
        self.samples, sources = sampled.samples, tokens_by_source(sampled.samples)
        if self._service is None:
            plan = self._planner.plan(lengths_of(sampled.batch))
            seconds = float(plan.metadata["planning_seconds"])
            return TrainingBatch(
                sampled.batch,
                plan,
                sources,
                sampled.position,
                seconds,
                waited_seconds=seconds,
                late=False,
                data_seconds=drawing,
            )
        late = self._service.report.late
        plan = self._service.take(number)
        plan.validate()
        return TrainingBatch(
            sampled.batch,
            plan,
            sources,
            sampled.position,
            float(plan.metadata["planning_seconds"]),
            waited_seconds=self._service.report.waited_seconds[-1],
            late=self._service.report.late > late,
            data_seconds=drawing,
        )

    def _order(self) -> None:
        sampled = sampled_batch(self._batches)
        self._corpus.require_ids_below(self._rows, sampled.samples)
        if self._service is not None:
            self._service.order(self._drawn, lengths_of(sampled.batch))
        self._waiting.append((self._drawn, sampled))
        self._drawn += 1

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._batches.close()
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


def make_batch(samples: Sequence[Sample]) -> Batch:
    """Tokens and labels of those sequences, and weights if any weighs other than 1."""
    is_weighted = any(sample.weight != 1 for sample in samples)
    return Batch(
        [torch.from_numpy(sample.tokens) for sample in samples],
        [torch.from_numpy(sample.labels) for sample in samples],
        [torch.from_numpy(sample.weights) for sample in samples] if is_weighted else None,
    )


def sampled_batch(batches: Batches) -> SampledBatch:
    """The next global batch of a run."""
    samples = batches.next()
    return SampledBatch(make_batch(samples), samples, batches.state_dict())
