"""The parts of one process and the steps that it does with them: forward, backward, optimizer; evaluation."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
from transformers import PretrainedConfig

from infinipipe.cost.model_flops import step_flops
from infinipipe.model import Stage, build_stage
from infinipipe.plan import Chunk, Plan
from infinipipe.runtime import (
    AllocatorMeter,
    Event,
    Executor,
    Layout,
    MemoryMeter,
    Mesh,
    Parameters,
    Recorder,
    ShardedParameters,
    clip_gradients,
    sync_shared_gradients,
)
from infinipipe.runtime.sharding import local
from infinipipe.train.heartbeat import WAITING, Announce, announce_nothing
from infinipipe.train.job import Job, OnFirst
from infinipipe.train.leader import Leader
from infinipipe.train.loader import PlannedBatch, TrainingBatch, lengths_of
from infinipipe.train.metrics import Evaluation, PlanSummary, StepRecord
from infinipipe.train.model import open_checkpoint
from infinipipe.train.optimizer import ParameterGroups, build_optimizer, set_learning_rate
from infinipipe.train.planning import StepPlanner
from infinipipe.train.settings import Settings
from infinipipe.train.timelines import StageEvents, write_timelines
from infinipipe.train.utilization import Busy, idle_share, peak_flops

P = TypeVar("P", bound=PlannedBatch)


class DivergedError(ValueError):
    """Loss or gradient is not finite; the weights are those of the step before."""


@dataclass(frozen=True)
class _Part:
    """What one process tells all others of a step."""

    stage: int
    loss_sum: float
    peak_bytes: int
    busy: Busy
    not_finite: list[int]


def layout_of(settings: Settings) -> Layout:
    """The layout that the settings ask for."""
    parallel = settings.parallel
    return Layout(
        replicas=parallel.replicas,
        stages=parallel.stages,
        sequence=parallel.sequence_parallel,
        order=tuple(parallel.mesh_order),
        placement=parallel.placed,
    )


class Trainer:
    """One process's stage with its optimizer. Constructing it is a collective of the job; so is every method.

    Args:
        length: typical length of the training sequences, see :class:`StepPlanner`.
        announce: told what this process does.

    Raises ``ValueError`` for settings that do not fit the model.
    """

    def __init__(
        self,
        job: Job,
        settings: Settings,
        config: PretrainedConfig,
        length: int,
        announce: Announce = announce_nothing,
    ) -> None:
        self.job, self.settings, self.config = job, settings, config
        self._announce = announce
        self.planner = job.everywhere(lambda: StepPlanner(settings, config, length))
        self.stage_layers = self.planner.cost.stage_layers
        self.mesh = Mesh(layout_of(settings).for_heads(config.num_attention_heads), job.device.type)
        self._announce("building the stage")
        self.stage, self.parameters = self._build()
        self._executor = Executor(
            self.stage,
            self.mesh.transport(),
            self.parameters,
            loss_block_tokens=settings.train.loss_block_tokens,
            shard=self.mesh.shard,
            announce=announce,
        )
        self.groups = self._groups()
        self.optimizer = build_optimizer(
            ((self.stage.stored_name(name), p) for name, p in self.parameters.named()), settings.optimizer, self.groups
        )
        self._meter = MemoryMeter()
        given = settings.train.peak_flops
        self._peak_flops = given or peak_flops(job.device, getattr(torch, settings.model.dtype))

    def _build(self) -> tuple[Stage, Parameters]:
        settings, sharding = self.settings, self.mesh.sharding()
        dtype: torch.dtype = getattr(torch, settings.model.dtype)
        stage = self.job.everywhere(
            lambda: build_stage(
                self.config,
                self.stage_layers,
                self.mesh.parts,
                dtype=torch.promote_types(dtype, torch.float32),
                device=self.job.device,
                seed=settings.train.seed,
                checkpoint=open_checkpoint(settings.model, self.config) if settings.model.weights == "load" else None,
            )
        )
        if sharding is None:
            return stage, Parameters(stage, dtype)
        parallel = settings.parallel
        return stage, ShardedParameters(
            stage, sharding, dtype=dtype, policy=parallel.gather_policy, gradients=parallel.gradient_policy
        )

    def _groups(self) -> ParameterGroups:
        """The groups of all stages' parameters."""
        own = [self.stage.stored_name(name) for name, _ in self.parameters.named()]
        embedding = self.stage.model.get_input_embeddings() if self.stage.has_embedding else None
        embeddings = [name for name, p in self.stage.model.named_parameters() if embedding and p is embedding.weight]
        gathered = self.job.gather_objects((own, embeddings))
        names = {name for of_rank, _ in gathered for name in of_rank}
        return self.job.on_first(
            lambda: ParameterGroups(
                self.settings.optimizer, names, {name for _, of_rank in gathered for name in of_rank}
            )
        )

    def _clip(self) -> float:
        """Scale gradients down as the settings ask; the norm of all before."""
        names = {name: self.stage.stored_name(name) for name, _ in self.parameters.named()}
        norms = [
            clip_gradients(self.stage, self.parameters, self.mesh, most or math.inf, members)
            for most, members in self.groups.clipped_together(names)
        ]
        return math.hypot(*norms)

    def step(self, number: int, leader: OnFirst[Leader]) -> tuple[StepRecord, TrainingBatch]:
        """One optimizer step, ``number`` counted from 1, on the leader's next batch; also that batch.

        Raises ``DivergedError`` before the weights change if the loss or a gradient is not finite.
        """
        start = time.perf_counter()
        self._announce(f"{WAITING} for the plan of step {number}")
        taken = self._share(leader, lambda leader: leader.next_batch(number))
        plan, batch = taken.plan, taken.batch
        self.parameters.zero_grad()
        drawn = number in self.settings.train.timeline_steps
        recorder = self._recorder() if drawn else Recorder(self.job.device)
        began = time.monotonic()
        with self._measured():
            result = self._executor.step(plan.replicas[self.mesh.replica], batch, recorder=recorder)
        self._announce(f"{WAITING} for the gradients of step {number}")
        sync_shared_gradients(self.stage, self.parameters, self.mesh)
        norm = self._clip()
        events = recorder.events()
        peak = max([self._peak_bytes(), *(event.peak for event in events)])
        part = _Part(self.mesh.stage, result.loss_sum, peak, Busy.of(events, began), _sequences(result.not_finite))
        parts = self.job.gather_objects(part)
        loss = sum(part.loss_sum for part in parts) / batch.total_weight
        if not math.isfinite(loss) or not math.isfinite(norm):
            self._diverged(number, loss, norm, parts, leader)
        self._announce(f"optimizer of step {number}")
        rate = self._update(number)
        seconds = time.perf_counter() - start
        if drawn:
            self._write_timelines(number, plan, events)
        peaks = [
            max(part.peak_bytes for part in parts if part.stage == stage) for stage in range(self.mesh.layout.stages)
        ]
        record = StepRecord(
            step=number,
            loss=loss,
            tokens=plan.num_tokens,
            seconds=seconds,
            gradient_norm=norm,
            learning_rate=rate,
            peak_bytes=peaks,
            memory_bytes=[peak + self.planner.cost.state_bytes(stage) for stage, peak in enumerate(peaks)],
            memory_budget=self.planner.settings.memory_budget,
            flops_per_second=step_flops(self.planner.shape, plan.lengths) / seconds / self.job.world_size,
            peak_flops=self._peak_flops,
            idle=idle_share(part.busy for part in parts),
            predicted_seconds=max(plan.metadata["predicted_seconds"]),
            predicted=plan.metadata["predicted_shares"],
            plan=PlanSummary.of(plan),
            plan_hash=plan.hash,
            planning_seconds=taken.planning_seconds,
            plan_wait_seconds=taken.waited_seconds,
            plan_late=taken.late,
            data_wait_seconds=taken.data_seconds,
            sources=taken.sources,
        )
        return record, taken

    def _share(self, leader: OnFirst[Leader], take: Callable[[Leader], P]) -> P:
        """What ``take`` gets from the leader, on all ranks, with the plans' hashes compared."""
        planned = leader.ask(take)
        self.job.check_equal(planned.plan.hash, "the plan")
        return planned

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
        settings = self.settings
        rate = set_learning_rate(self.optimizer, number - 1, settings.train.steps, settings.optimizer)
        for _, parameter in self.parameters.named():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.parameters.publish()
        return rate

    def _diverged(self, number: int, loss: float, norm: float, parts: list[_Part], leader: OnFirst[Leader]) -> NoReturn:
        """Raise ``DivergedError`` on rank 0, naming stages and documents."""
        gradients = [local(p.grad) for _, p in self.parameters.named() if p.grad is not None]
        broken = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        stages = sorted({stage for stage, is_broken in self.job.gather_objects((self.mesh.stage, broken)) if is_broken})
        chosen = sorted(set(itertools.chain.from_iterable(part.not_finite for part in parts)))
        documents = leader.ask(lambda leader: leader.documents(chosen))
        where = f"gradients at stage {', '.join(map(str, stages))}" if stages else "no gradient"
        whose = "documents with such a loss" if chosen else "documents of the step"
        self.job.stop(
            DivergedError(
                f"step {number}: the loss is {loss:g} and the gradient norm {norm:g}, {where} not finite; the weights were left "
                f"as they were before the step; {whose}: {documents}; look at these, lower "
                "optimizer.learning_rate or raise optimizer.warmup_steps"
            )
        )

    def evaluate(self, leader: OnFirst[Leader]) -> Evaluation | None:
        """Mean loss on held-out sequences by forwards through the same pipelines; ``None`` if there are none."""
        self._announce(f"{WAITING} for the evaluation")
        limit, size = self.settings.train.evaluate_sequences, self.settings.data.sequences_per_step
        count = min(leader.ask(Leader.num_held_out), limit)
        loss_sum, weight, tokens = 0.0, 0.0, 0
        for first in range(0, count, size):
            chosen = list(range(first, min(first + size, count)))
            planned = self._share(leader, partial(self._plan_held_out, chosen=chosen))
            loss_sum += self._executor.evaluate(planned.plan.replicas[self.mesh.replica], planned.batch).loss_sum
            weight += planned.batch.total_weight
            tokens += planned.batch.num_supervised
        total = sum(self.job.gather_objects(loss_sum))
        return Evaluation(total / weight, tokens) if tokens else None

    def _plan_held_out(self, leader: Leader, chosen: list[int]) -> PlannedBatch:
        batch = leader.held_out_batch(chosen)
        return PlannedBatch(batch, self.planner.plan_forwards(lengths_of(batch)))

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
        own = sum(p.numel() for name, p in self.parameters.named() if self.stage.owns(name))
        by_stage = dict(self.job.gather_objects((self.mesh.stage, own)))
        return (
            f"{self.config.model_type} model of {sum(by_stage.values()) / 1e6:.1f}M weights, "
            f"{'+'.join(map(str, self.stage_layers))} layers on {self.settings.parallel.layout}, {self.settings.model.dtype}"
        )


def _sequences(chunks: list[Chunk]) -> list[int]:
    """The sequences of those chunks, by their index in the batch."""
    return [piece.sequence for chunk in chunks for piece in chunk.slices]
