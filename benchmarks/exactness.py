"""Exactness of random plans on real processes, against the plain Hugging Face model in one process.

Every case draws a model family, a number of stages, odd lengths, a plan and recompute counts. Every fourth case has several parts of
the model on each stage, interleaved, v-shaped or scattered in turn; every third its backwards in two halves. Then come layouts of
replicas x stages x sequence parallelism with both gather policies, among them the same. Those repeated in float32 have a
sequence of 41 tokens or more without a mask: where all supervised tokens are first tokens, query and key gradients are zero but
for rounding, and a relative error says nothing. The last line printed is a JSON object with the worst errors.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from infinipipe.cost import GatherPolicy, GradientPolicy, even_stages
from infinipipe.plan import Chunk, Pipeline, Placement, Plan, build_replica, cut, whole
from infinipipe.runtime import Layout
from infinipipe.runtime.pool import WorkerPool
from infinipipe.verify import FAMILIES, Case, random_plan, run_in_pool
from infinipipe.verify.plans import SCHEDULES, random_layers

LENGTHS = (1, 2, 3, 17, 41, 64, 89, 137, 200)


def random_case(seed: int) -> Case:
    """A case drawn from ``seed``."""
    rng = random.Random(seed)
    config = list(FAMILIES.values())[seed % len(FAMILIES)]()
    num_stages = 1 + (seed // len(FAMILIES)) % 4
    lengths = [rng.choice(LENGTHS) for _ in range(rng.randint(1, 6))]
    if seed % 3 == 0:
        lengths += [1, 2]
    rng.shuffle(lengths)
    recompute = rng.choice(["none", "all", "random", "random"])
    placement = Placement.plain(num_stages)
    schedules: Sequence[str] = SCHEDULES
    if seed % 4 == 0:
        num_stages = 2 + (seed // 4) % 2
        kinds = (Placement.interleaved, Placement.v_shaped, partial(scattered, rng))
        placement = kinds[(seed // 4) % 3](num_stages, 2)
    if seed % 3 == 0:
        schedules = ("zero-bubble",)
    layers = even_stages(4, num_stages) if placement.is_plain else random_layers(rng, 4, placement.num_parts)
    plan = random_plan(rng, lengths, layers, recompute=recompute, placement=placement, schedules=schedules)
    return Case(config, plan, seed=seed, masked=rng.choice([0.0, 0.3, 0.6]), weighted=seed % 5 == 0)


def scattered(rng: random.Random, num_stages: int, parts_per_stage: int) -> Placement:
    """Parts on stages without any pattern, some next to each other."""
    parts = list(range(num_stages * parts_per_stage))
    rng.shuffle(parts)
    return Placement(tuple(tuple(sorted(parts[stage::num_stages])) for stage in range(num_stages)))


def pointed_cases() -> list[Case]:
    """Cases that random ones hit seldom: few chunks on many stages, equal slices of equal tokens all recomputed."""
    cases = []
    for number, family in enumerate(FAMILIES.values()):
        lengths = [96, 1, 2]
        first, second, third = cut(0, 96, [32, 64])
        chunks = (Chunk((first,)), Chunk((second,)), Chunk((third, *whole(lengths, [1, 2]))))
        layers = even_stages(4, 4)
        recompute = [[n] * 3 for n in layers]
        replica = build_replica([Pipeline(chunks)], 4, recompute=recompute)
        cases.append(Case(family(), Plan(layers, tuple(lengths), (replica,)), seed=number, masked=0.4))
        one = build_replica([Pipeline((Chunk(whole(lengths, [0, 1, 2])),))], 4)
        cases.append(Case(family(), Plan(layers, tuple(lengths), (one,)), seed=number))
    return cases


LAYOUTS = (
    Layout(sequence=2),
    Layout(replicas=2),
    Layout(stages=2, sequence=2),
    Layout(replicas=2, stages=2),
    Layout(replicas=2, sequence=2),
    Layout(replicas=2, stages=2, sequence=2),
    Layout(stages=2, sequence=4),
    Layout(stages=4, sequence=2),
    Layout(sequence=8),
)
POLICIES: tuple[GatherPolicy, ...] = ("keep", "release")
GRADIENTS: tuple[GradientPolicy, ...] = ("whole", "sharded")


def layout_case(seed: int, layout: Layout) -> Case:
    """A case of odd lengths for a layout; with two replicas, one of them may get nothing."""
    rng = random.Random(seed)
    config = list(FAMILIES.values())[seed % len(FAMILIES)]()
    lengths = [137, 89, 1] + ([rng.choice([2041, 41])] if seed % 4 == 0 else [])
    makes = (lambda stages, _: Placement.plain(stages), Placement.interleaved, Placement.v_shaped)
    placement = makes[seed % 3](layout.stages, 2) if layout.stages > 1 else Placement.plain(1)
    layers = even_stages(4, layout.stages) if placement.is_plain else random_layers(rng, 4, placement.num_parts)
    schedules = ("zero-bubble",) if seed % 2 else SCHEDULES
    plan = random_plan(rng, lengths, layers, num_replicas=layout.replicas, placement=placement, schedules=schedules)
    return Case(config, plan, seed=seed, masked=rng.choice([0.0, 0.4]), weighted=seed % 2 == 1)


def run_layouts(pool: WorkerPool, rounds: int, seed: int) -> tuple[dict[str, object], Counter[str]]:
    """Every layout with both gather policies, ``rounds`` times; the worst errors, and what was exercised."""
    worst: dict[str, float] = {}
    features = Counter[str]()
    worst_loss, cases, empty = 0.0, 0, 0
    for number in range(rounds * len(POLICIES)):
        for index, layout in enumerate(LAYOUTS):
            case = layout_case(seed + number * len(LAYOUTS) + index, layout)
            policy, gradients = POLICIES[number % len(POLICIES)], GRADIENTS[(number // len(POLICIES) + index) % 2]
            outcome = run_in_pool(pool, case, layout, policy=policy, gradients=gradients)
            name = f"{layout.replicas}x{layout.stages}x{layout.sequence}"
            worst[name] = max(worst.get(name, 0.0), outcome.gradient_error)
            worst_loss = max(worst_loss, outcome.loss_difference)
            cases += 1
            features.update(outcome.features)
            features["sharded gradients"] += gradients == "sharded" and layout.sequence > 1
            empty += any(not replica.chunks for replica in case.plan.replicas)
    figures: dict[str, object] = {
        "cases": cases,
        "max_rel_err_float64": max(worst.values()),
        "max_loss_diff": worst_loss,
        "replicas_without_chunks": empty,
        "by_layout": worst,
    }
    return figures, features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, under 50 seconds")
    parser.add_argument("--cases", type=int, help="number of random float64 cases")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    count = options.cases or (40 if options.quick else 400)
    torch.set_num_threads(1)
    begin = time.perf_counter()
    drawn = [random_case(options.seed * 1_000_003 + i) for i in range(count)]
    cases = pointed_cases() + drawn
    attending = [replace(case, dtype="float32", masked=0.0) for case in drawn if max(case.plan.lengths) >= 41]
    cases += attending[: max(10, count // 4)]
    worst = {"float64": 0.0, "float32": 0.0}
    worst_loss, features = 0.0, Counter[str]()
    with WorkerPool(8) as pool:
        for number, case in enumerate(cases):
            outcome = run_in_pool(pool, case)
            worst[case.dtype] = max(worst[case.dtype], outcome.gradient_error)
            if case.dtype == "float64":
                worst_loss = max(worst_loss, outcome.loss_difference)
            features.update(outcome.features)
            if (number + 1) % 20 == 0:
                print(
                    f"{number + 1}/{len(cases)} cases, {time.perf_counter() - begin:.0f} s, worst {worst}", flush=True
                )
        layouts, layout_features = run_layouts(pool, 1 if options.quick else 5, options.seed)
    figures = {
        "cases": len(cases),
        "max_rel_err_float64": worst["float64"],
        "max_rel_err_float32": worst["float32"],
        "max_loss_diff": worst_loss,
        "features": dict(sorted((features + layout_features).items())),
        "layouts": layouts | {"features": dict(sorted(layout_features.items()))},
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
