"""How well simulated steps predict real ones: step time and peak memory of random plans that the cost model never saw.

Two processes of one thread run a small Llama in 2 stages. Plans of the profile's design, from which the cost model is
fitted, and random plans, which are predicted, run interleaved, each until it has as many undisturbed runs as the others,
until the time is up. A run is undisturbed if no process computed for 8% longer than in the plan's fastest run
(:mod:`infinipipe.profile.timing`). A plan's measured step time is the median over its undisturbed runs. Memory is measured
before, in one run of each plan. With ``--sequence_parallel``, the two processes share one stage's tokens instead.

The last line printed is a JSON object:

* ``time_err_p50``, ``time_err_p90``: relative error of predicted step times, over plans;
* ``memory_err_p50``, ``memory_err_p90``: of predicted peak bytes of activations, over plans and stages;
* ``noise_p50``, ``noise_p90``: the same plan twice: relative difference of its step time between every other of the runs
  that count and the rest;
* ``disturbed_noise_p50``, ``disturbed_noise_p90``: the same between every other of all its runs and the rest;
* ``simulator_err_p50``, ``simulator_err_p90``: error of the step time that the simulator puts together from the plan's own
  measured actions: what is left of the error if the cost model knew every action;
* ``undisturbed``: share of runs that were undisturbed; ``runs``: median over predicted plans of the runs that count;
* ``plans``: how many plans were predicted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import LlamaConfig

from infinipipe.cost import AnalyticCost
from infinipipe.plan import COLUMNS, Plan, ReplicaPlan
from infinipipe.profile import Design, Setup, fit_samples, formula
from infinipipe.profile.memory import memory_ratios
from infinipipe.profile.samples import plan_samples
from infinipipe.profile.timing import Run, rounds, stage_processes, undisturbed
from infinipipe.profile.workers import (
    MESSAGE_TOKENS,
    metered_run,
    time_messages,
    timed_run,
)
from infinipipe.runtime.pool import WorkerPool
from infinipipe.simulate import Engine, simulate
from infinipipe.verify import random_plan

MOST_RUNS = 20
"""Undisturbed runs of a plan that are enough."""
LAYERS = 4
LINK_REPEATS = 20
METERED = 6
"""Plans of the design whose memory corrects the formula."""


@dataclass(frozen=True)
class Scale:
    """How much is measured: sizes in tokens, plans, and the seconds when it must be done."""

    longest: int
    capacity: int
    calibration: int
    tested: int
    seconds: float


QUICK = Scale(longest=384, capacity=256, calibration=18, tested=20, seconds=47)
FULL = Scale(longest=2048, capacity=1024, calibration=40, tested=40, seconds=600)


def model() -> LlamaConfig:
    """The model that is run."""
    return LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=256,
        intermediate_size=704,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=2048,
    )


def random_plans(scale: Scale, stage_layers: Sequence[int], seed: int = 1) -> list[Plan]:
    """Random batches under random valid plans: cuts, packing, order, schedule, warm-up and recompute."""
    rng = random.Random(seed)
    plans = []
    for _ in range(scale.tested):
        lengths = [round(64 * (scale.longest / 64) ** rng.random()) for _ in range(rng.randint(2, 4))]
        plans.append(random_plan(rng, lengths, stage_layers))
    return plans


@dataclass(frozen=True)
class Measured:
    """Runs of all plans, the design's first, and seconds of messages."""

    metered: list[Run]
    timed: list[list[Run]]
    messages: list[float]


def measure(setup: Setup, known: Sequence[Plan], unknown: Sequence[Plan], until: float) -> Measured:
    """Run everything, until the monotonic clock says ``until``."""
    plans = [*known, *unknown]
    timed: list[list[Run]] = [[] for _ in plans]
    with WorkerPool(setup.num_processes) as pool:
        metered = [metered_run(pool, setup, plan) for plan in (*known[:METERED], *unknown)]
        messages: list[float] = []
        if len(setup.stage_layers) > 1:
            messages = pool.run(time_messages, setup, MESSAGE_TOKENS, LINK_REPEATS)[0]
        for index in rounds(timed, MOST_RUNS, random.Random(0)):
            timed[index].append(timed_run(pool, setup, plans[index]))
            if time.monotonic() > until and min(map(len, timed)) > 0:
                break
    return Measured(metered, timed, messages)


def assembled_seconds(plan: Plan, runs: Sequence[Run], cost: AnalyticCost) -> float:
    """The step time that the simulator puts together from the measured actions."""
    replica: ReplicaPlan = plan.replicas[0]
    seconds = {column: np.zeros((plan.num_stages, len(replica.chunks))) for column in COLUMNS}
    number = {chunk: index for index, chunk in enumerate(replica.chunks)}
    for sample in plan_samples(plan, runs):
        seconds[sample.column][sample.stage, number[sample.chunk]] = sample.seconds
    message = [cost.message_seconds(chunk.num_tokens) for chunk in replica.chunks]
    return Engine(replica).makespan(seconds, message)


def step_seconds(runs: Sequence[Run]) -> float:
    """The median makespan."""
    return statistics.median(run.makespan for run in runs)


def difference(runs: Sequence[Run]) -> float:
    """Of the step time between every other run and the rest, relative."""
    return step_seconds(runs[::2]) / step_seconds(runs[1::2]) - 1


def quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median and 90th percentile of absolute values."""
    sizes = np.abs(values)
    return {f"{name}_p50": float(np.median(sizes)), f"{name}_p90": float(np.quantile(sizes, 0.9))}


def run(scale: Scale, *, shared: bool) -> dict[str, object]:
    """Measure, fit, predict and compare, on two stages or on one that is shared."""
    started = time.monotonic()
    stage_layers = (LAYERS,) if shared else (LAYERS // 2, LAYERS // 2)
    shards = 2 // len(stage_layers)
    setup = Setup(model(), stage_layers, sequence_parallel=shards, shards=shards)
    design = Design(
        longest=scale.longest,
        capacity=scale.capacity,
        smallest=16,
        max_slices=8,
        num_plans=scale.calibration,
    )
    known, unknown = design.plans(stage_layers), random_plans(scale, stage_layers)
    measured = measure(setup, known, unknown, started + scale.seconds)
    samples = [plan_samples(plan, runs) for plan, runs in zip(known, measured.timed, strict=False)]
    ratios = memory_ratios(list(zip(known[:METERED], measured.metered, strict=False)), formula(setup, stage_layers))
    profile = fit_samples(setup, stage_layers, samples, ratios, measured.messages)
    cost = profile.cost
    for name, fit in (("forward", profile.forward), ("backward", profile.backward)):
        print(f"{name} fit: {fit.quality.error_p50:.1%} / {fit.quality.error_p90:.1%} of {fit.quality.points} actions")
    print("tokens chunks  measured predicted    error  runs undisturbed   peak MiB measured / predicted by stage")
    time_errors, simulator_errors, memory_errors = [], [], []
    tried = measured.timed[len(known) :]
    chosen = [undisturbed(runs) for runs in tried]
    for plan, memory, runs, everything in zip(unknown, measured.metered[METERED:], chosen, tried, strict=True):
        simulation, seconds = simulate(plan.replicas[0], cost), step_seconds(runs)
        time_errors.append(simulation.makespan / seconds - 1)
        simulator_errors.append(assembled_seconds(plan, everything, cost) / seconds - 1)
        cells = []
        for stage in range(len(stage_layers)):
            first = stage_processes(stage, len(stage_layers), memory)[0]
            peak = max(event.peak for event in memory.events[first])
            predicted = simulation.peaks[stage] - cost.state_bytes(stage)
            memory_errors.append(predicted / peak - 1)
            cells.append(f"{peak / 2**20:.2f} / {predicted / 2**20:.2f}")
        print(
            f"{plan.num_tokens:6d} {len(plan.replicas[0].chunks):6d} {seconds * 1e3:7.0f} ms {simulation.makespan * 1e3:6.0f} ms"
            f" {time_errors[-1]:+8.1%} {len(everything):5d} {len(runs):11d}   {'   '.join(cells)}"
        )
    return {
        **quantiles("time_err", time_errors),
        **quantiles("memory_err", memory_errors),
        **quantiles("noise", [difference(runs) for runs in chosen if len(runs) > 1]),
        **quantiles("disturbed_noise", [difference(runs) for runs in tried if len(runs) > 1]),
        **quantiles("simulator_err", simulator_errors),
        "undisturbed": sum(len(undisturbed(runs)) for runs in measured.timed) / sum(map(len, measured.timed)),
        "runs": statistics.median(map(len, chosen)),
        "plans": len(unknown),
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against real step time and memory on two processes.")
    parser.add_argument("--quick", action="store_true", help="smaller plans, fewer rounds; under 50 s on two cores")
    parser.add_argument(
        "--sequence_parallel", action="store_true", help="two processes that share a stage, instead of two stages"
    )
    options = parser.parse_args()
    print(json.dumps(run(QUICK if options.quick else FULL, shared=options.sequence_parallel)))


if __name__ == "__main__":
    main()
