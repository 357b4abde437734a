"""The parts of one process and the steps that it does with them: forward, backward, optimizer; evaluation."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig

from infinipipe.data import Sequences
from infinipipe.model import Stage, build_stage
from infinipipe.plan import Chunk, Plan
from infinipipe.runtime import (
    AllocatorMeter,
    Batch,
    Event,
    Executor,
    Layout,
    MemoryMeter,
    Mesh,
    Parameters,
    Recorder,
    ShardedParameters,
    clip_gradients,
    sync_tied_gradients,
)
from infinipipe.runtime.sharding import local
from infinipipe.train.feed import Feed, Planned, lengths_of, make_batch, require_supervised
from infinipipe.train.job import Job
from infinipipe.train.metrics import PlanSummary, StepRecord
from infinipipe.train.optimizer import build_optimizer, learning_rate
from infinipipe.train.planning import StepPlanner
from infinipipe.train.progress import WAITING, Progress
from infinipipe.train.settings import Settings
from infinipipe.train.timelines import StageEvents, write_timelines

NAMED_AT_MOST = 8
"""Documents that a message lists."""


class DivergedError(ValueError):
    """Loss or gradient is not finite; the weights are those of the step before."""


@dataclass(frozen=True)
class Evaluation:
    """The mean loss over ``tokens`` supervised tokens."""

    loss: float
    tokens: int


@dataclass(frozen=True)
class _Part:
    """What one process tells all others of a step."""

    stage: int
    loss_sum: float
    peak_bytes: int
    not_finite: list[int]


def layout_of(settings: Settings) -> Layout:
    """The layout that the settings ask for."""
    parallel = settings.parallel
    return Layout(
        replicas=parallel.replicas,
        stages=parallel.stages,
        sequence=parallel.sequence_parallel,
        order=tuple(parallel.mesh_order),
    )


class Trainer:
    """One process's stage with its optimizer. Constructing it is a collective of the job; so is every method.

    Args:
        length: typical length of the training sequences, see :class:`StepPlanner`.

    Raises ``ValueError`` for settings that do not fit the model.
    """

    def __init__(
        self, job: Job, settings: Settings, config: PretrainedConfig, length: int, progress: Progress | None = None
    ) -> None:
        self.job, self.settings, self.config = job, settings, config
        self._progress = progress
        self.planner = job.everywhere(lambda: StepPlanner(settings, config, length))
        self.stage_layers = self.planner.cost.stage_layers
        self.mesh = Mesh(layout_of(settings).for_heads(config.num_attention_heads), job.device.type)
        self.doing("building the stage")
        self.stage, self.parameters = self._build()
        self._executor = Executor(
            self.stage,
            self.mesh.transport(),
            self.parameters,
            loss_block_tokens=settings.train.loss_block_tokens,
            shard=self.mesh.shard,
            announce=None if progress is None else progress.doing,
        )
        self.optimizer = build_optimizer((p for _, p in self.parameters.named()), settings.optimizer)
        self._meter = MemoryMeter()

    def _build(self) -> tuple[Stage, Parameters]:
        settings, sharding = self.settings, self.mesh.sharding()
        dtype: torch.dtype = getattr(torch, settings.model.dtype)
        stage = self.job.everywhere(
            lambda: build_stage(
                self.config,
                self.stage_layers,
                self.mesh.stage,
                dtype=torch.promote_types(dtype, torch.float32),
                device=self.job.device,
                seed=settings.train.seed,
                checkpoint=settings.model.path if settings.model.weights == "load" else None,
            )
        )
        if sharding is None:
            return stage, Parameters(stage, dtype)
        return stage, ShardedParameters(stage, sharding, dtype=dtype, policy=settings.parallel.gather_policy)

    def doing(self, action: str) -> None:
        """Say what this process does next."""
        if self._progress is not None:
            self._progress.doing(action)

    def step(self, number: int, feed: Feed | None) -> tuple[StepRecord, Planned | None]:
        """One optimizer step, ``number`` counted from 1, on the next of ``feed``, which rank 0 has; also what came from it.

        Raises ``DivergedError`` before the weights change if the loss or a gradient is not finite.
        """
        start = time.perf_counter()
        planned: Planned | None = None

        def make() -> Planned:
            nonlocal planned
            assert feed is not None, "rank 0 has the feed"
            self.doing(f"planning step {number}")
            planned = feed.next()
            return planned

        self.doing(f"{WAITING} for the plan of step {number}")
        plan, batch = self.job.share_step(lambda: ((made := make()).plan, made.drawn.batch))
        self.parameters.zero_grad()
        recorder = self._recorder() if number in self.settings.train.timeline_steps else None
        with self._measured():
            result = self._executor.step(plan.replicas[self.mesh.replica], batch, recorder=recorder)
        self.doing(f"{WAITING} for the gradients of step {number}")
        sync_tied_gradients(self.stage, self.parameters, self.mesh)
        norm = clip_gradients(self.stage, self.parameters, self.mesh, self.settings.optimizer.max_norm or math.inf)
        events = recorder.events() if recorder is not None else []
        peak = max([self._peak_bytes(), *(event.peak for event in events)])
        part = _Part(self.mesh.stage, result.loss_sum, peak, _sequences(result.not_finite))
        parts = self.job.gather_objects(part)
        loss = sum(part.loss_sum for part in parts) / batch.num_supervised
        if not math.isfinite(loss) or not math.isfinite(norm):
            self._diverged(number, loss, norm, parts, feed, planned)
        self.doing(f"optimizer of step {number}")
        rate = self._update(number)
        if recorder is not None:
            self._write_timelines(number, plan, events)
        record = StepRecord(
            step=number,
            loss=loss,
            tokens=plan.num_tokens,
            seconds=time.perf_counter() - start,
            gradient_norm=norm,
            learning_rate=rate,
            peak_bytes=[
                max(part.peak_bytes for part in parts if part.stage == stage) for stage in range(len(self.stage_layers))
            ],
            plan=PlanSummary.of(plan),
            plan_hash=plan.hash,
            planning_seconds=planned.planning_seconds if planned else 0.0,
            plan_wait_seconds=planned.waited_seconds if planned else 0.0,
            plan_late=planned.late if planned else False,
        )
        return record, planned

    def _recorder(self) -> Recorder:
        """What records a step with its memory."""
        device = self.job.device
        return Recorder(device, AllocatorMeter(device) if device.type == "cuda" else self._meter)

    def _write_timelines(self, number: int, plan: Plan, events: list[Event]) -> None:
        """Gather what every process recorded; rank 0 writes it."""
        mesh = self.mesh
        recorded = self.job.gather_objects(StageEvents(mesh.replica, mesh.stage, mesh.sequence, events))
        if self.job.is_first:
            folder = Path(self.settings.train.output) / "timelines"
            write_timelines(folder, number, plan, self.planner.cost, recorded, self.planner.settings.memory_budget)

    def _update(self, number: int) -> float:
        """The optimizer's step; returns its learning rate."""
        rate = learning_rate(number - 1, self.settings.train.steps, self.settings.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for _, parameter in self.parameters.named():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.parameters.publish()
        return rate

    def _diverged(
        self,
        number: int,
        loss: float,
        norm: float,
        parts: list[_Part],
        feed: Feed | None,
        planned: Planned | None,
    ) -> None:
        """Raise ``DivergedError`` on rank 0, naming stages and documents."""
        gradients = [local(p.grad) for _, p in self.parameters.named() if p.grad is not None]
        broken = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        stages = sorted({stage for stage, is_broken in self.job.gather_objects((self.mesh.stage, broken)) if is_broken})
        chosen = sorted(set(itertools.chain.from_iterable(part.not_finite for part in parts)))

        def refuse() -> None:
            assert feed is not None
            assert planned is not None
            samples = [planned.drawn.samples[sequence] for sequence in chosen] or planned.drawn.samples
            sequences = feed.sequences
            names = [sequences.cache.name(int(sequences.documents[sample])) for sample in samples[:NAMED_AT_MOST]]
            more = f" and {len(samples) - len(names)} more" if len(samples) > len(names) else ""
            where = f"gradients at stage {', '.join(map(str, stages))}" if stages else "no gradient"
            whose = "documents with such a loss" if chosen else "documents of the step"
            raise DivergedError(
                f"step {number}: the loss is {loss:g} and the gradient norm {norm:g}, {where} not finite; the weights were left "
                f"as they were before the step; {whose}: {', '.join(names)}{more}; look at these, lower "
                "optimizer.learning_rate or raise optimizer.warmup_steps"
            )

        self.job.on_first(refuse)

    def evaluate(self, held_out: Sequences | None) -> Evaluation | None:
        """Mean loss on held-out sequences, rank 0's, by forwards through the same pipelines; ``None`` if there are none."""
        self.doing(f"{WAITING} for the evaluation")
        limit, size = self.settings.train.evaluate_sequences, self.settings.data.sequences_per_step
        count = self.job.on_first(lambda: 0 if held_out is None else min(len(held_out), limit))
        loss_sum, tokens = 0.0, 0
        for first in range(0, count, size):
            chosen = list(range(first, min(first + size, count)))
            plan, batch = self.job.share_step(partial(self._planned, held_out, chosen))
            loss_sum += self._executor.evaluate(plan.replicas[self.mesh.replica], batch).loss_sum
            tokens += batch.num_supervised
        total = sum(self.job.gather_objects(loss_sum))
        return Evaluation(total / tokens, tokens) if tokens else None

    def _planned(self, held_out: Sequences | None, chosen: list[int]) -> tuple[Plan, Batch]:
        assert held_out is not None, "rank 0 has the held-out sequences"
        batch = make_batch(held_out, chosen)
        require_supervised(batch)
        return self.planner.plan(lengths_of(batch)), batch

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Watch live activation bytes: by the allocator on CUDA, by the operators on the CPU."""
        if self.job.device.type == "cuda":
            self._base_bytes = torch.cuda.memory_allocated(self.job.device)
            torch.cuda.reset_peak_memory_stats(self.job.device)
            yield
        else:
            self._meter.reset_peak()
            with self._meter:
                yield

    def _peak_bytes(self) -> int:
        if self.job.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.job.device) - self._base_bytes
        return self._meter.peak

    def describe(self) -> str:
        """The model and how it is laid out, in one line."""
        own = sum(p.numel() for _, p in self.parameters.named())
        if self.stage.tied_parameter is not None and self.stage.is_last:
            own -= self.stage.tied_parameter.numel()
        by_stage = dict(self.job.gather_objects((self.mesh.stage, own)))
        return (
            f"{self.config.model_type} model of {sum(by_stage.values()) / 1e6:.1f}M weights, "
            f"{'+'.join(map(str, self.stage_layers))} layers on {self.settings.parallel.layout}, {self.settings.model.dtype}"
        )


def _sequences(chunks: list[Chunk]) -> list[int]:
    """The sequences of those chunks, by their index in the batch."""
    return [piece.sequence for chunk in chunks for piece in chunk.slices]
