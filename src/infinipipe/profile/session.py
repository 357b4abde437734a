"""A profile from start to end: measure, resume what was interrupted, fit, write."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from infinipipe.cost import AnalyticCost, Holding, PassTime, flop_cost, state_bytes
from infinipipe.files import write_beside
from infinipipe.plan import Placement, Plan
from infinipipe.profile.design import Design
from infinipipe.profile.fit import PassFit, Quality, Sample, fit_link, fit_pass, fit_weight
from infinipipe.profile.memory import MemoryRatios, memory_ratios
from infinipipe.profile.samples import plan_samples
from infinipipe.profile.timing import Run, rounds, undisturbed
from infinipipe.profile.workers import (
    EXCHANGE_BYTES,
    MESSAGE_TOKENS,
    Setup,
    metered_run,
    time_exchanges,
    time_messages,
    time_optimizer,
    timed_run,
)
from infinipipe.runtime import Event
from infinipipe.runtime.footprint import footprint
from infinipipe.runtime.pool import WorkerPool
from infinipipe.timeline.units import readable_seconds

HELD_OUT = 5
"""Every so many plans, one is kept for judging the fit."""
MESSAGE_REPEATS = 20
OPTIMIZER_REPEATS = 5
TIMEOUT = 3600.0
"""Seconds that a message may take: as long as the largest chunk of a large model."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many parts are done, and how many there are."""


@dataclass(frozen=True)
class Measured:
    """What a profile measures.

    Attributes:
        metered: every plan of every layout with its run for memory; the layouts are those of :func:`setups`.
        timed: every plan with its runs for times, layout after layout.
        messages: seconds of messages of ``MESSAGE_TOKENS``; empty if there is one device.
        optimizer: seconds of an optimizer step of every measured stage's whole parameters.
        exchanges: seconds of all-to-alls of ``EXCHANGE_BYTES``; empty where the runs have those that they need.
    """

    metered: list[tuple[Plan, Run]]
    timed: list[tuple[Plan, list[Run]]]
    messages: list[float]
    optimizer: list[float]
    exchanges: list[float]


@dataclass
class Parts:
    """What has been measured so far, by name; written after every part, so that a profile can go on where it stopped.

    Attributes:
        path: where the parts are kept, if anywhere.
        stored: the parts, as JSON has them.
    """

    path: Path | None
    stored: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def resume(cls, path: Path | None, key: str) -> Parts:
        """What an interrupted profile with the same ``key`` has left at ``path``; a file of another is begun anew.

        Raises ``WriteError``.
        """
        result = cls(path)
        if path is None:
            return result
        lines = path.read_text().splitlines() if path.is_file() else []
        try:
            stored = [json.loads(line) for line in lines]
        except ValueError:
            stored = [json.loads(line) for line in lines[:-1]]
        if stored and stored[0] == {"key": key}:
            result.stored = {name: value for line in stored[1:] for name, value in line.items()}
        text = [json.dumps({"key": key}), *(json.dumps({name: value}) for name, value in result.stored.items())]
        write_beside(path, ("\n".join(text) + "\n").encode())
        return result

    def get(self, name: str, measure: Callable[[], list[Any]]) -> list[Any]:
        """The part of that name, measured if it is not there yet."""
        if name not in self.stored:
            self.stored[name] = measure()
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps({name: self.stored[name]}) + "\n")
        part: list[Any] = self.stored[name]
        return part

    def run(self, name: str, measure: Callable[[], Run]) -> Run:
        """The run of that name, measured if it is not there yet."""

        def plain() -> list[Any]:
            return [[dataclasses.astuple(event) for event in row] for row in measure().events]

        return Run(tuple(tuple(Event(*event) for event in row) for row in self.get(name, plain)))


def setups(setup: Setup) -> list[Setup]:
    """The layout itself, and one of other layers a stage, which tells what a layer costs from what a stage does."""
    layers = setup.stage_layers
    others = tuple(max(1, count // 2) for count in layers)
    if others == layers:
        others = tuple(2 * count for count in layers)
    return [setup, dataclasses.replace(setup, stage_layers=others)]


def measure(
    setup: Setup, design: Design, repeats: int, partial: Path | None, progress: Progress, *, seed: int = 0
) -> Measured:
    """Run everything: every plan once for its memory, then all plans until each has ``repeats`` undisturbed runs.

    The plans come in random order in every round; where the machine is never undisturbed for long, fewer runs must do
    (:func:`infinipipe.profile.timing.rounds`). ``partial`` is where parts are kept as they come. Raises ``WorkerError`` if a process fails.
    """
    variants = setups(setup)
    shape = ([variant.key for variant in variants], setup.threads, setup.sequence_parallel, design, repeats, seed)
    parts = Parts.resume(partial, hashlib.sha256(repr(shape).encode()).hexdigest())
    jobs = [(variant, plan) for variant in variants for plan in design.plans(variant.stage_layers)]
    metered: list[tuple[Plan, Run]] = []
    timed: list[list[Run]] = [[] for _ in jobs]
    total = len(jobs) * (repeats + 1)
    backend = "gloo" if setup.device == "cpu" else "cpu:gloo,cuda:nccl"
    with WorkerPool(setup.num_processes, backend=backend, timeout=TIMEOUT) as pool:
        for number, job in enumerate(jobs):
            progress("memory", number, total)
            metered.append((job[1], parts.run(f"{number}/memory", functools.partial(metered_run, pool, *job))))
        for number in rounds(timed, repeats, random.Random(seed)):
            useful = sum(min(len(undisturbed(runs)), repeats) for runs in timed)
            progress("times", len(jobs) + useful, total)
            name = f"{number}/{len(timed[number])}"
            timed[number].append(parts.run(name, functools.partial(timed_run, pool, *jobs[number])))
        optimizer = parts.get("optimizer", lambda: pool.run(time_optimizer, setup, OPTIMIZER_REPEATS))
    messages, exchanges = [], []
    progress("messages", total, total)
    if setup.device == "cpu" or torch.cuda.device_count() > 1:
        pair = dataclasses.replace(setup, stage_layers=(1, 1), shards=1)
        with WorkerPool(2, backend=backend) as pool:
            messages = parts.get("messages", lambda: pool.run(time_messages, pair, MESSAGE_TOKENS, MESSAGE_REPEATS)[0])
    if setup.sequence_parallel > setup.shards:
        with WorkerPool(setup.sequence_parallel, backend=backend) as pool:
            arguments = (setup.device, EXCHANGE_BYTES, MESSAGE_REPEATS)
            exchanges = parts.get("exchanges", lambda: pool.run(time_exchanges, *arguments)[0])
    plans = [plan for _, plan in jobs]
    return Measured(metered, list(zip(plans, timed, strict=True)), messages, optimizer[:: setup.shards], exchanges)


@dataclass(frozen=True)
class Profile:
    """What a profile yields.

    Attributes:
        cost: the cost model over the requested stages.
        forward, backward: fits of the two passes.
        memory: measured bytes over the formula's.
        weight: of the fit of a backward's second half, if that was measured.
    """

    cost: AnalyticCost
    forward: PassFit
    backward: PassFit
    memory: MemoryRatios
    weight: Quality | None = None


def fit_profile(
    setup: Setup, measured: Measured, stage_layers: Sequence[int], placement: Placement | None = None
) -> Profile:
    """Fit a cost model over ``stage_layers``, those of the parts of ``placement``, to what was measured on ``setup``'s stages.

    Raises ``ValueError``.
    """
    windows = {each.stage_layers: formula(each, each.stage_layers).layer_windows for each in setups(setup)}
    samples = [plan_samples(plan, runs, windows[plan.stage_layers]) for plan, runs in measured.timed]
    metered = [(plan, run) for plan, run in measured.metered if plan.stage_layers == setup.stage_layers]
    as_measured = dataclasses.replace(setup, sequence_parallel=setup.shards)
    ratios = memory_ratios(metered, formula(as_measured, setup.stage_layers))
    profile = fit_samples(
        setup, stage_layers, samples, ratios, measured.messages, measured.exchanges, placement=placement
    )
    whole = formula(dataclasses.replace(setup, sequence_parallel=1), setup.stage_layers)
    optimizer = statistics.median(
        seconds / size for seconds, size in zip(measured.optimizer, whole.states, strict=True)
    )
    return dataclasses.replace(profile, cost=dataclasses.replace(profile.cost, optimizer=optimizer))


def fit_samples(
    setup: Setup,
    stage_layers: Sequence[int],
    samples: Sequence[Sequence[Sample]],
    ratios: MemoryRatios,
    message_seconds: Sequence[float],
    exchange_seconds: Sequence[float] = (),
    *,
    placement: Placement | None = None,
) -> Profile:
    """Fit a cost model to the ``samples`` of every plan, judged by every fifth plan.

    ``message_seconds`` are those of ``MESSAGE_TOKENS``, empty if there is one device; ``exchange_seconds`` those of
    ``EXCHANGE_BYTES``, empty if the samples have the all-to-alls that are needed. Raises ``ValueError``.
    """
    base = formula(setup, stage_layers, placement)
    base = dataclasses.replace(
        base,
        message=fit_link(
            [base.memory.message * count for count in MESSAGE_TOKENS[: len(message_seconds)]], message_seconds
        ),
        all_to_all=fit_link(EXCHANGE_BYTES[: len(exchange_seconds)], exchange_seconds),
    )
    kept = [sample for p, part in enumerate(samples) if p % HELD_OUT for sample in part]
    held_out = [sample for part in samples[::HELD_OUT] for sample in part]
    forward, backward = (fit_pass(kept, held_out, pass_) for pass_ in ("forward", "backward"))
    weight = fit_weight([*kept, *held_out])
    cost = dataclasses.replace(
        base,
        forward=forward.time,
        backward=backward.time,
        backward_weight=None if weight is None else weight[0],
        recompute=_recompute(forward, backward),
        memory=ratios.corrected(base.memory),
        name=f"{setup.config.model_type} on {setup.device}",
        source=_source(setup, forward, backward),
    )
    return Profile(cost, forward, backward, ratios, None if weight is None else weight[1])


def _recompute(forward: PassFit, backward: PassFit) -> PassTime | None:
    """What computing layers again takes, and what their forwards take more, or less, for dropping their activations.

    Both come and go together; a step takes as long whichever of its actions they are charged to.
    """
    if backward.recompute is None:
        return None
    token, chunk = forward.dropping
    time = backward.recompute
    return dataclasses.replace(time, token=max(time.token + token, 0.0), chunk=max(time.chunk + chunk, 0.0))


def formula(setup: Setup, stage_layers: Sequence[int], placement: Placement | None = None) -> AnalyticCost:
    """The cost model of the model's shape over ``stage_layers``, with AdamW's states."""
    dtype: torch.dtype = getattr(torch, setup.dtype)
    known = footprint(setup.config, dtype)
    shape = dataclasses.replace(known.shape, layers=sum(stage_layers))
    holding = Holding(element_bytes=dtype.itemsize, sequence_parallel=setup.sequence_parallel)
    return flop_cost(
        shape,
        stage_layers,
        element_bytes=dtype.itemsize,
        sequence_parallel=setup.sequence_parallel,
        states=state_bytes(shape, stage_layers, placement, holding),
        block_tokens=setup.loss_block_tokens,
        placement=placement,
        layers=known.layers,
    )


def _source(setup: Setup, *fits: PassFit) -> str:
    device = torch.cuda.get_device_name() if setup.device == "cuda" else platform.processor() or platform.machine()
    errors = ", ".join(
        f"{name} {fit.held_out.error_p50:.1%} / {fit.held_out.error_p90:.1%}"
        for name, fit in zip(("forward", "backward"), fits, strict=True)
    )
    return (
        f"measured on {setup.num_processes} processes, {device}, torch {torch.__version__}; "
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
    if profile.weight is not None:
        yield (
            f"second half of backward, {profile.weight.points} actions: error {profile.weight.error_p50:.1%} at the median, "
            f"{profile.weight.error_p90:.1%} at the 90th percentile"
        )
    memory = ", ".join(f"{name} {value:.3f}" for name, value in asdict(profile.memory).items() if value == value)
    yield f"bytes measured over the formula's: {memory}"
    if profile.cost.num_stages > 1 and not profile.cost.message.seconds_per_byte:
        yield "warning: one device has no messages; they count as free"
    for name, link in (("messages", profile.cost.message), ("all-to-alls", profile.cost.all_to_all)):
        if link.seconds_per_byte:
            yield f"{name}: {link.latency * 1e6:.0f} us and {1e-9 / link.seconds_per_byte:.2f} GB/s"
    yield f"optimizer step: {readable_seconds(profile.cost.optimizer_seconds)}"
