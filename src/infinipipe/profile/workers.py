"""What the processes of a profile do: each holds a stage, or its share of one, and runs plans, messages and the optimizer."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from infinipipe.model import build_stage
from infinipipe.plan import Channel, Direction, Plan
from infinipipe.profile.timing import Run
from infinipipe.runtime import (
    AllocatorMeter,
    Batch,
    Event,
    Executor,
    Layout,
    MemoryMeter,
    Parameters,
    Recorder,
)
from infinipipe.runtime.pool import WorkerPool, get_mesh

MESSAGE_TOKENS = (1, 64, 256, 1024, 4096)
"""Sizes of the messages that are timed."""
EXCHANGE_BYTES = (2**12, 2**16, 2**20, 2**23)
"""Sizes of the all-to-alls that are timed: what one process sends and keeps."""


@dataclass(frozen=True)
class Setup:
    """What is measured, and on what.

    Attributes:
        config: the model that the cost file describes.
        stage_layers: layers of the measured stages: the model's first, over again if they are more than it has.
        dtype: of the computing, ``float32`` or ``bfloat16``.
        device: ``cpu`` or ``cuda``.
        threads: of each process on the CPU.
        loss_block_tokens: tokens whose logits exist at once.
        sequence_parallel: processes that share a stage's tokens in what the cost file describes.
        shards: processes that share each measured stage's tokens: as many, or 1 where there are too few devices for that.
    """

    config: PretrainedConfig
    stage_layers: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    loss_block_tokens: int = 1024
    sequence_parallel: int = 1
    shards: int = 1

    @property
    def num_processes(self) -> int:
        """Processes of all measured stages."""
        return len(self.stage_layers) * self.shards

    @property
    def key(self) -> str:
        """A digest of everything that decides what is measured."""
        config = self.config.to_json_string()
        parts = (config, self.stage_layers, self.dtype, self.device, self.loss_block_tokens, self.shards)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The configuration with another number of layers, whose types repeat those that it names."""
    fields = config.to_dict() | {"num_hidden_layers": layers}
    types = fields.get("layer_types")
    if types:
        fields["layer_types"] = [types[i % len(types)] for i in range(layers)]
    return type(config).from_dict(fields)


class _Bench:
    """A stage with its executor, built once in a worker's life."""

    def __init__(self, rank: int, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        device = torch.device("cpu") if setup.device == "cpu" else torch.device("cuda", rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        layout = Layout(stages=len(setup.stage_layers), sequence=setup.shards)
        mesh = get_mesh(layout.for_heads(setup.config.num_attention_heads), device.type)
        self.device = device
        self.vocab = int(setup.config.vocab_size)
        config = with_layers(setup.config, sum(setup.stage_layers))
        self.stage = build_stage(
            config, setup.stage_layers, mesh.stage, dtype=getattr(torch, setup.dtype), device=device
        )
        self.parameters = Parameters(self.stage)
        self.transport = mesh.transport()
        self.place = mesh.stage
        self.executor = Executor(
            self.stage,
            self.transport,
            self.parameters,
            loss_block_tokens=setup.loss_block_tokens,
            shard=mesh.shard,
        )

    def batch(self, plan: Plan) -> Batch:
        """Random tokens for a plan."""
        generator = torch.Generator().manual_seed(0)
        return Batch.from_tokens([torch.randint(0, self.vocab, (n,), generator=generator) for n in plan.lengths])

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


_benches: dict[str, _Bench] = {}


def _bench(rank: int, setup: Setup) -> _Bench:
    if setup.key not in _benches:
        _benches[setup.key] = _Bench(rank, setup)
    return _benches[setup.key]


def time_plan(rank: int, setup: Setup, plan: Plan) -> list[Event]:
    """Run a plan's first replica on random tokens: its events."""
    bench = _bench(rank, setup)
    batch = bench.batch(plan)
    dist.barrier()
    recorder = Recorder(bench.device)
    bench.executor.step(plan.replicas[0], batch, recorder=recorder)
    return recorder.events()


def meter_plan(rank: int, setup: Setup, plan: Plan) -> list[Event]:
    """Run a plan's first replica on random tokens: its events with live bytes; their times include the metering."""
    bench = _bench(rank, setup)
    batch = bench.batch(plan)
    dist.barrier()
    on_cpu = bench.device.type == "cpu"
    with MemoryMeter() if on_cpu else nullcontext(AllocatorMeter(bench.device)) as meter:
        recorder = Recorder(bench.device, meter)
        bench.executor.step(plan.replicas[0], batch, recorder=recorder)
    return recorder.events()


def timed_run(pool: WorkerPool, setup: Setup, plan: Plan) -> Run:
    """Run a plan for its times."""
    return Run(tuple(map(tuple, pool.run(time_plan, setup, plan))))


def metered_run(pool: WorkerPool, setup: Setup, plan: Plan) -> Run:
    """Run a plan for its memory."""
    return Run(tuple(map(tuple, pool.run(meter_plan, setup, plan))))


def time_messages(rank: int, setup: Setup, num_tokens: Sequence[int], repeats: int) -> list[float]:
    """Median seconds of one transfer of so many tokens between the first two stages: half of there and back."""
    bench = _bench(rank, setup)
    place, medians = bench.place, []
    there, back = (Channel(0, direction) for direction in Direction)
    for count in num_tokens:
        seconds = []
        shape = (count, bench.stage.hidden_size)
        message = torch.zeros(shape, dtype=bench.stage.dtype, device=bench.device)
        dist.barrier()
        for _ in range(repeats if place < 2 else 0):
            incoming = bench.transport.receive(back if place == 0 else there, shape, bench.stage.dtype, bench.device)
            start = time.monotonic()
            if place == 0:
                bench.transport.send(there, message)
            incoming.wait()
            if place == 1:
                bench.transport.send(back, message)
            bench.synchronize()
            seconds.append((time.monotonic() - start) / 2)
            bench.transport.finish()
        medians.append(statistics.median(seconds) if seconds else 0.0)
    return medians


def time_optimizer(rank: int, setup: Setup, repeats: int) -> float:
    """Median seconds of a step of AdamW on the stage's parameters, without changing them for good."""
    bench = _bench(rank, setup)
    optimizer = torch.optim.AdamW([p for _, p in bench.parameters.named()], lr=0.0, weight_decay=0.0)
    seconds = []
    for _ in range(repeats + 1):
        start = time.monotonic()
        optimizer.step()
        bench.synchronize()
        seconds.append(time.monotonic() - start)
    return statistics.median(seconds[1:])


def time_exchanges(rank: int, device: str, num_bytes: Sequence[int], repeats: int) -> list[float]:
    """Median seconds of an all-to-all of all processes, each of which sends and keeps so many bytes."""
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    medians = []
    for size in num_bytes:
        count = size // dist.get_world_size() * dist.get_world_size()
        sent = torch.zeros(count, dtype=torch.uint8, device=place)
        received = torch.empty_like(sent)
        seconds = []
        for _ in range(repeats + 1):
            dist.barrier()
            start = time.monotonic()
            dist.all_to_all_single(received, sent)
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            seconds.append(time.monotonic() - start)
        medians.append(statistics.median(seconds[1:]))
    return medians
