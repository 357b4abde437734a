"""A profile from start to end: measure, resume what was interrupted, fit, write."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from infinipipe.cost import AnalyticCost, Link, ModelShape, flop_cost, state_bytes
from infinipipe.plan import ActionKind, Plan
from infinipipe.profile.design import Design
from infinipipe.profile.fit import PassFit, Sample, fit_link, fit_pass
from infinipipe.profile.memory import MemoryRatios, memory_ratios
from infinipipe.profile.samples import Run, plan_samples
from infinipipe.profile.workers import (
    EXCHANGE_BYTES,
    MESSAGE_TOKENS,
    Setup,
    run_plan,
    time_exchanges,
    time_messages,
    time_optimizer,
)
from infinipipe.runtime import Event
from infinipipe.verify.pool import WorkerPool

HELD_OUT = 5
"""Every so many plans, one is kept for judging the fit."""
MESSAGE_REPEATS = 20
OPTIMIZER_REPEATS = 5
TIMEOUT = 3600.0
"""Seconds that a message may take: as long as the largest chunk of a large model."""
ADAMW_BYTES = 16
"""A float32 parameter with its gradient and two moments."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many parts are done, and how many there are."""


@dataclass
class Measurements:
    """Everything that a profile measures, by name; written after every part, so that it can go on where it stopped.

    Attributes:
        path: where the parts are kept, if anywhere.
        parts: events of ``SETUP/plan/ROUND``, seconds of messages and of optimizer steps.
    """

    path: Path | None
    parts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def resume(cls, path: Path | None, key: str) -> Measurements:
        """What an interrupted profile with the same ``key`` has left at ``path``; a file of another is begun anew."""
        result = cls(path)
        if path is None:
            return result
        lines = path.read_text().splitlines() if path.is_file() else []
        try:
            stored = [json.loads(line) for line in lines]
        except ValueError:
            stored = [json.loads(line) for line in lines[:-1]]
        if stored and stored[0] == {"key": key}:
            result.parts = {name: value for line in stored[1:] for name, value in line.items()}
        text = [json.dumps({"key": key}), *(json.dumps({name: value}) for name, value in result.parts.items())]
        path.write_text("\n".join(text) + "\n")
        return result

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The part of that name, measured if it is not there yet."""
        if name not in self.parts:
            self.parts[name] = measure()
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps({name: self.parts[name]}) + "\n")
        return self.parts[name]

    def runs(self, setup: int, plan: int, rounds: Sequence[int]) -> list[Run]:
        """Recorded runs of a plan."""
        parts = (self.parts[f"{setup}/{plan}/{number}"] for number in rounds)
        return [[[Event(*event) for event in row] for row in part] for part in parts]


def setups(setup: Setup) -> list[Setup]:
    """The layout itself, and one of other layers a stage, which tells what a layer costs from what a stage does."""
    layers = setup.stage_layers
    others = tuple(max(1, count // 2) for count in layers)
    if others == layers:
        others = tuple(2 * count for count in layers)
    return [setup, dataclasses.replace(setup, config=with_layers(setup.config, sum(others)), stage_layers=others)]


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The configuration with another number of layers, whose types repeat those that it names."""
    fields = config.to_dict() | {"num_hidden_layers": layers}
    types = fields.get("layer_types")
    if types:
        fields["layer_types"] = [types[i % len(types)] for i in range(layers)]
    return type(config).from_dict(fields)


def measure(
    setup: Setup, design: Design, repeats: int, partial: Path | None, progress: Progress, *, seed: int = 0
) -> Measurements:
    """Run everything: every plan once for its memory, then all plans ``repeats`` times in random order.

    ``partial`` is where parts are kept as they come. Raises ``WorkerError`` if a process fails.
    """
    variants = setups(setup)
    shape = ([variant.key for variant in variants], setup.threads, setup.sequence_parallel, design, repeats, seed)
    key = hashlib.sha256(repr(shape).encode()).hexdigest()
    measurements = Measurements.resume(partial, key)
    jobs = [
        (v, p, plan) for v, variant in enumerate(variants) for p, plan in enumerate(design.plans(variant.stage_layers))
    ]
    total, done = len(jobs) * (repeats + 1), 0
    rng = random.Random(seed)
    backend = "gloo" if setup.device == "cpu" else "cpu:gloo,cuda:nccl"
    with WorkerPool(len(setup.stage_layers), backend=backend, timeout=TIMEOUT) as pool:
        for number in range(repeats + 1):
            what = "memory" if number == 0 else f"times, round {number} of {repeats}"
            for v, p, plan in rng.sample(jobs, len(jobs)):
                progress(what, done, total)
                measurements.get(f"{v}/{p}/{number}", recorded(pool, variants[v], plan, metered=number == 0))
                done += 1
        progress("messages and optimizer", done, total)
        if len(setup.stage_layers) > 1:
            measurements.get("messages", lambda: pool.run(time_messages, setup, MESSAGE_TOKENS, MESSAGE_REPEATS)[0])
        measurements.get("optimizer", lambda: pool.run(time_optimizer, setup, OPTIMIZER_REPEATS))
    if setup.sequence_parallel > 1 and "exchanges" not in measurements.parts:
        progress("all-to-alls", done, total)
        with WorkerPool(setup.sequence_parallel, backend=backend) as pool:
            arguments = (setup.device, EXCHANGE_BYTES, MESSAGE_REPEATS)
            measurements.get("exchanges", lambda: pool.run(time_exchanges, *arguments)[0])
    return measurements


def recorded(pool: WorkerPool, setup: Setup, plan: Plan, *, metered: bool) -> Callable[[], list[Any]]:
    """What runs a plan when it is called, and returns its events as lists."""

    def run() -> list[Any]:
        rows = pool.run(run_plan, setup, plan, metered)
        return [[dataclasses.astuple(event) for event in row] for row in rows]

    return run


@dataclass(frozen=True)
class Profile:
    """What a profile yields.

    Attributes:
        cost: the cost model over the requested stages.
        forward, backward: fits of the two passes.
        memory: measured bytes over the formula's.
        optimizer_seconds: an optimizer step of each measured stage.
    """

    cost: AnalyticCost
    forward: PassFit
    backward: PassFit
    memory: MemoryRatios
    optimizer_seconds: tuple[float, ...] = ()


def fit_profile(
    setup: Setup, design: Design, repeats: int, measurements: Measurements, stage_layers: Sequence[int]
) -> Profile:
    """Fit a cost model over ``stage_layers`` to what was measured on ``setup``'s stages. Raises ``ValueError``."""
    samples: list[list[Sample]] = []
    metered: list[tuple[Plan, Run]] = []
    for v, variant in enumerate(setups(setup)):
        for p, plan in enumerate(design.plans(variant.stage_layers)):
            runs = measurements.runs(v, p, range(1, repeats + 1))
            samples.append(plan_samples(plan, runs, on_cpu=setup.device == "cpu"))
            if v == 0:
                metered += [(plan, run) for run in measurements.runs(v, p, [0])]
    ratios = memory_ratios(metered, formula(dataclasses.replace(setup, sequence_parallel=1), setup.stage_layers))
    profile = fit_samples(setup, stage_layers, samples, ratios, measurements.parts.get("messages", ()))
    cost = profile.cost
    if "exchanges" in measurements.parts:
        cost = dataclasses.replace(cost, all_to_all=fit_link(EXCHANGE_BYTES, measurements.parts["exchanges"]))
    return dataclasses.replace(profile, cost=cost, optimizer_seconds=tuple(measurements.parts["optimizer"]))


def fit_samples(
    setup: Setup,
    stage_layers: Sequence[int],
    samples: Sequence[Sequence[Sample]],
    ratios: MemoryRatios,
    message_seconds: Sequence[float],
) -> Profile:
    """Fit a cost model to the ``samples`` of every plan, judged by every fifth plan.

    ``message_seconds`` are those of ``MESSAGE_TOKENS``; empty if there is one stage. Raises ``ValueError``.
    """
    kept = [sample for p, part in enumerate(samples) if p % HELD_OUT for sample in part]
    held_out = [sample for part in samples[::HELD_OUT] for sample in part]
    forward, backward = (fit_pass(kept, held_out, kind) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))
    base = formula(setup, stage_layers)
    link = Link()
    if message_seconds:
        link = fit_link([base.memory.message * count for count in MESSAGE_TOKENS], message_seconds)
    cost = dataclasses.replace(
        base,
        forward=forward.time,
        backward=backward.time,
        recompute=backward.recompute,
        memory=ratios.corrected(base.memory),
        message=link,
        name=f"{setup.config.model_type} on {setup.device}",
        source=_source(setup, forward, backward),
    )
    return Profile(cost, forward, backward, ratios)


def formula(setup: Setup, stage_layers: Sequence[int]) -> AnalyticCost:
    """The cost model of the model's shape over ``stage_layers``, with AdamW's states."""
    dtype: torch.dtype = getattr(torch, setup.dtype)
    shape = dataclasses.replace(ModelShape.from_config(setup.config.to_dict()), layers=sum(stage_layers))
    copies = dtype.itemsize if dtype != torch.float32 else 0
    return flop_cost(
        shape,
        stage_layers,
        element_bytes=dtype.itemsize,
        sequence_parallel=setup.sequence_parallel,
        states=state_bytes(
            shape, stage_layers, bytes_per_parameter=ADAMW_BYTES + copies, shards=setup.sequence_parallel
        ),
        block_tokens=setup.loss_block_tokens,
    )


def _source(setup: Setup, *fits: PassFit) -> str:
    device = torch.cuda.get_device_name() if setup.device == "cuda" else platform.processor() or platform.machine()
    errors = ", ".join(
        f"{name} {fit.held_out.error_p50:.1%} / {fit.held_out.error_p90:.1%}"
        for name, fit in zip(("forward", "backward"), fits, strict=True)
    )
    return (
        f"measured on {len(setup.stage_layers)} processes, {device}, torch {torch.__version__}; "
        f"held-out error of actions (median / 90th percentile): {errors}"
    )


def quality_lines(profile: Profile) -> Iterator[str]:
    """What to tell the user of a profile."""
    for name, fit in (("forward", profile.forward), ("backward", profile.backward)):
        for where, quality in (("fitted", fit.quality), ("held-out", fit.held_out)):
            yield (
                f"{name}, {quality.points} {where} actions: error {quality.error_p50:.1%} at the median, "
                f"{quality.error_p90:.1%} at the 90th percentile"
            )
        for warning in fit.quality.warnings:
            yield f"warning: the form does not fit {name}s of {warning}"
    memory = ", ".join(f"{name} {value:.3f}" for name, value in asdict(profile.memory).items() if value == value)
    yield f"bytes measured over the formula's: {memory}"
    if profile.cost.num_stages > 1 and not profile.cost.message.seconds_per_byte:
        yield "warning: one process has no messages; they count as free"
    for name, link in (("messages", profile.cost.message), ("all-to-alls", profile.cost.all_to_all)):
        if link.seconds_per_byte:
            yield f"{name}: {link.latency * 1e6:.0f} us and {1e-9 / link.seconds_per_byte:.2f} GB/s"
    if profile.optimizer_seconds:
        yield "optimizer step: " + ", ".join(f"{seconds * 1e3:.1f} ms" for seconds in profile.optimizer_seconds)
