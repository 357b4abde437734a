"""How well simulated steps predict real ones: step time and peak memory of random plans that the cost model never saw.

Two processes of one thread run a small Llama in 2 stages. Plans of the profile's design, from which the cost model is
fitted, and random plans, which are predicted, run interleaved in rounds until the time is up; the first round measures memory.
A plan's measured step time is the median over its runs, of the least disturbed half where other programs took more than
2% of the processors from it.

The last line printed is a JSON object:

* ``time_err_p50``, ``time_err_p90``: relative error of predicted step times, over plans;
* ``memory_err_p50``, ``memory_err_p90``: of predicted peak bytes of activations, over plans and stages;
* ``noise_p50``, ``noise_p90``: relative difference of the same plan's step time between even and odd rounds;
* ``disturbed_p50``: share of the actions' time that other programs took, the median over runs;
* ``work_err_p50``, ``work_err_p90``: error of predicted step times against the measured actions, each with the time for which
  its thread ran, put together by the simulator: what the cost model alone misses;
* ``rounds``, ``plans``: how often each plan ran, and how many were predicted.
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
from infinipipe.plan import ActionKind, Plan, ReplicaPlan
from infinipipe.profile import Design, Setup, fit_samples, formula
from infinipipe.profile.memory import memory_ratios
from infinipipe.profile.samples import Run, disturbance, makespan, plan_samples
from infinipipe.profile.workers import MESSAGE_TOKENS, run_plan, time_messages
from infinipipe.simulate import Engine, simulate
from infinipipe.verify import WorkerPool, random_plan

STAGE_LAYERS = (2, 2)
QUIET = 0.02
"""Share that other programs may take of a run that counts as undisturbed."""
FEWEST_ROUNDS = 2


@dataclass(frozen=True)
class Scale:
    """How much is measured: sizes in tokens, and seconds for all rounds."""

    longest: int
    capacity: int
    calibration: int
    tested: int
    seconds: float


QUICK = Scale(longest=384, capacity=256, calibration=18, tested=20, seconds=32)
FULL = Scale(longest=2048, capacity=1024, calibration=40, tested=40, seconds=600)


def model() -> LlamaConfig:
    """The model that is run."""
    return LlamaConfig(
        num_hidden_layers=sum(STAGE_LAYERS),
        hidden_size=256,
        intermediate_size=704,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=2048,
    )


def random_plans(scale: Scale, seed: int = 1) -> list[Plan]:
    """Random batches under random valid plans: cuts, packing, order, schedule, warm-up and recompute."""
    rng = random.Random(seed)
    plans = []
    for _ in range(scale.tested):
        lengths = [round(64 * (scale.longest / 64) ** rng.random()) for _ in range(rng.randint(2, 4))]
        plans.append(random_plan(rng, lengths, STAGE_LAYERS))
    return plans


def measure(setup: Setup, plans: Sequence[Plan], seconds: float) -> tuple[list[Run], list[list[Run]], list[float]]:
    """Memory runs, timed runs and message times: one run of each plan for memory, then rounds until the time is up."""
    rng = random.Random(0)
    timed: list[list[Run]] = [[] for _ in plans]
    with WorkerPool(len(STAGE_LAYERS)) as pool:
        began = time.monotonic()
        metered: list[Run] = [pool.run(run_plan, setup, plan, True) for plan in plans]
        round_seconds = 0.0
        while len(timed[0]) < FEWEST_ROUNDS or time.monotonic() - began + round_seconds < seconds:
            started = time.monotonic()
            for index in rng.sample(range(len(plans)), len(plans)):
                timed[index].append(pool.run(run_plan, setup, plans[index], False))
            round_seconds = time.monotonic() - started
        messages: list[float] = pool.run(time_messages, setup, MESSAGE_TOKENS, 10)[0]
    return metered, timed, messages


def step_seconds(runs: Sequence[Run]) -> float:
    """The median step time of the undisturbed runs, or of the less disturbed half if there are fewer."""
    ranked = sorted(runs, key=disturbance)
    quiet = sum(disturbance(run) <= QUIET for run in runs)
    return statistics.median(makespan(run) for run in ranked[: max(quiet, (len(runs) + 1) // 2)])


def undisturbed_seconds(plan: Plan, runs: Sequence[Run], cost: AnalyticCost) -> float:
    """The step time that follows from what every action's thread ran, the median over runs."""
    replica: ReplicaPlan = plan.replicas[0]
    forward, backward = np.zeros((2, plan.num_stages, len(replica.chunks)))
    samples = iter(plan_samples(plan, runs, on_cpu=True))
    for stage, actions in enumerate(replica.actions):
        for action in actions:
            table = forward if action.kind is ActionKind.FORWARD else backward
            table[stage, action.chunk] = next(samples).seconds
    message = [cost.message_seconds(chunk.num_tokens) for chunk in replica.chunks]
    return Engine(replica).makespan(forward, backward, message)


def quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median and 90th percentile of absolute values."""
    sizes = np.abs(values)
    return {f"{name}_p50": float(np.median(sizes)), f"{name}_p90": float(np.quantile(sizes, 0.9))}


def run(scale: Scale) -> dict[str, object]:
    """Measure, fit, predict and compare."""
    started = time.monotonic()
    setup = Setup(model(), STAGE_LAYERS)
    design = Design(
        longest=scale.longest,
        capacity=scale.capacity,
        smallest=16,
        max_slices=8,
        num_plans=scale.calibration,
    )
    known, unknown = design.plans(STAGE_LAYERS), random_plans(scale)
    metered, timed, messages = measure(setup, [*known, *unknown], scale.seconds)
    samples = [plan_samples(p, runs, on_cpu=True) for p, runs in zip(known, timed, strict=False)]
    ratios = memory_ratios(list(zip(known, metered, strict=False)), formula(setup, STAGE_LAYERS))
    profile = fit_samples(setup, STAGE_LAYERS, samples, ratios, messages)
    cost = profile.cost
    for name, fit in (("forward", profile.forward), ("backward", profile.backward)):
        print(f"{name} fit: {fit.quality.error_p50:.1%} / {fit.quality.error_p90:.1%} of {fit.quality.points} actions")
    print("tokens chunks  measured predicted    error  disturbed   peak MiB measured / predicted by stage")
    time_errors, work_errors, memory_errors, noise = [], [], [], []
    for plan, memory, runs in zip(unknown, metered[len(known) :], timed[len(known) :], strict=True):
        simulation = simulate(plan.replicas[0], cost)
        measured = step_seconds(runs)
        time_errors.append(simulation.makespan / measured - 1)
        work_errors.append(simulation.makespan / undisturbed_seconds(plan, runs, cost) - 1)
        even, odd = (statistics.median(makespan(r) for r in runs[first::2]) for first in (0, 1))
        noise.append(even / odd - 1)
        cells = []
        for stage, row in enumerate(memory):
            peak = max(event.peak for event in row)
            predicted = simulation.peaks[stage] - cost.state_bytes(stage)
            memory_errors.append(predicted / peak - 1)
            cells.append(f"{peak / 2**20:.2f} / {predicted / 2**20:.2f}")
        print(
            f"{plan.num_tokens:6d} {len(plan.replicas[0].chunks):6d} {measured * 1e3:7.0f} ms {simulation.makespan * 1e3:6.0f} ms"
            f" {time_errors[-1]:+8.1%} {statistics.median(map(disturbance, runs)):10.0%}   {'   '.join(cells)}"
        )
    return {
        **quantiles("time_err", time_errors),
        **quantiles("memory_err", memory_errors),
        **quantiles("noise", noise),
        "disturbed_p50": statistics.median(disturbance(r) for runs in timed for r in runs),
        **quantiles("work_err", work_errors),
        "rounds": len(timed[0]),
        "plans": len(unknown),
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against real step time and memory on two processes.")
    parser.add_argument("--quick", action="store_true", help="smaller plans, fewer rounds; under 50 s on two cores")
    print(json.dumps(run(QUICK if parser.parse_args().quick else FULL)))


if __name__ == "__main__":
    main()
