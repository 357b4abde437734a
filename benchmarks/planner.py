"""Planners against the ideal step, the recompute solver against its bound, and what planning takes.

Batches are drawn from a skewed distribution (lognormal, mu 7.0, sigma 1.63, clipped to the context) and from the lengths of the
Python standard library's source files, at ``BYTES_PER_TOKEN`` bytes a token. Three kinds of cells:

* ``free``: no fixed cost of a chunk, ample memory, at most 32 slices, only the floating-point operations of a 13B model: how much
  of the step is bubble and imbalance.
* ``calibrated``: the presets with the fixed cost per micro-batch as published, which is that of parameters gathered for every use, a
  budget of 72 GB a device, 8-way sequence parallelism.
* ``resident``: the same with parameters that stay gathered, which costs their memory, and what is left of that cost then.

The ideal has no bubble, no recompute, no all-to-all and the fewest chunks possible. Planning times are CPU seconds of one core. The last
line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import resource
import sysconfig
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from infinipipe.cost import (
    AnalyticCost,
    GatherPolicy,
    Holding,
    ModelShape,
    balanced_stages,
    even_stages,
    flop_cost,
    state_bytes,
    typical_length,
)
from infinipipe.cost.presets import MODELS, preset
from infinipipe.plan.ahead import forwards_ahead
from infinipipe.planner import PlannerSettings, plan_replica, plan_step, planner_names
from infinipipe.planner.chunking import balanced_chunking
from infinipipe.planner.compare import UNPIPED, Outcome, compare
from infinipipe.planner.draft import Draft, fit_slice_time
from infinipipe.planner.memory import BudgetError
from infinipipe.planner.solvers import close_gap, solve, solve_exactly
from infinipipe.simulate import simulate_plan

BYTES_PER_TOKEN = 4.0
BUDGET = 72_000_000_000
PARTS = ("planners", "solver", "sharing", "random", "scaling", "windows", "balance")
HEADLINES = ("elastic_over_ideal", "speedup_vs_fixed_chunk", "speedup_vs_packed", "speedup_vs_paper")
"""Figures of the ``resident`` cells that stand first."""
FEW_LAYERS = 50
"""Below so many recomputed layers one layer more is a gap of over 2%."""
MAIN = ("elastic", "elastic-paper", "fixed-chunk", "packed-1f1b")
WINDOWED = ModelShape(
    layers=62,
    hidden=5376,
    intermediate=21504,
    heads=32,
    kv_heads=16,
    head_dim=128,
    vocab=262144,
    tied=True,
    windows=(1024, 1024, 1024, 1024, 1024, 0),
)
"""The sizes of Gemma 3 27B."""
WIDE_HEAD = ModelShape(layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064)
"""The shape of Qwen2.5 7B."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting of the comparison."""

    kind: str
    model: str
    stages: int
    sequences: int
    context: int
    corpus: str

    def cost(self) -> AnalyticCost:
        if self.kind == "free":
            shape = MODELS[self.model]
            stages = even_stages(shape.layers, self.stages)
            cost = flop_cost(shape, stages, states=[0] * self.stages)
            return dataclasses.replace(cost, forward=dataclasses.replace(cost.forward, head_token=0.0))
        policy: GatherPolicy = "keep" if self.kind == "resident" else "release"
        return preset(f"{self.model}-a100", self.stages, holding=Holding(sequence_parallel=8, gather_policy=policy))

    def settings(self) -> PlannerSettings:
        if self.kind == "free":
            return PlannerSettings()
        return PlannerSettings(memory_budget=BUDGET, token_capacity=self.context)

    def lengths(self, seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        if self.corpus == "lognormal":
            drawn = np.exp(rng.normal(7.0, 1.63, self.sequences)).astype(np.int64)
        else:
            drawn = rng.choice(np.array(standard_library()), self.sequences)
        return np.clip(drawn, 1, self.context).tolist()


def standard_library() -> list[int]:
    """Lengths in tokens of the standard library's source files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    return sorted(max(1, round(path.stat().st_size / BYTES_PER_TOKEN)) for path in files if path.stat().st_size)


def cells(*, quick: bool) -> list[Cell]:
    """All cells, or those that tell most."""
    thousand = 1000
    free = [
        Cell("free", "13b", stages, sequences, context * thousand, "lognormal")
        for stages, sequences in ((4, 512), (8, 512), (8, 128))
        for context in (48, 96, 192)
    ]
    if quick:
        some = [
            ("7b", 4, 48, "lognormal"),
            ("13b", 4, 96, "stdlib"),
            ("13b", 8, 192, "lognormal"),
            ("30b", 8, 96, "lognormal"),
        ]
    else:
        some = [
            (model, stages, context, corpus)
            for model in ("7b", "13b", "30b")
            for stages in (4, 8)
            for context in (48, 96, 192)
            for corpus in ("lognormal", "stdlib")
        ]
    return free + [
        Cell(kind, model, stages, 512, context * thousand, corpus)
        for kind in ("calibrated", "resident")
        for model, stages, context, corpus in some
    ]


def measure(cell: Cell, planners: Iterable[str], seeds: int) -> list[dict[str, Outcome]]:
    """Outcomes by planner for every seed."""
    results = []
    for seed in range(seeds):
        outcomes = compare(cell.lengths(seed), cell.cost(), cell.settings(), planners, context=cell.context)
        results.append({outcome.planner: outcome for outcome in outcomes})
    return results


def mean(values: Iterable[float]) -> float:
    kept = [value for value in values if not math.isnan(value)]
    return float(np.mean(kept)) if kept else math.nan


def geometric(values: Iterable[float]) -> float:
    return math.exp(mean(math.log(value) for value in values if not math.isnan(value)))


def compare_planners(planners: Sequence[str], *, quick: bool, seeds: int) -> dict[str, object]:
    """Print a line per cell and planner, ``MAIN`` among them; returns the figures by kind of cell."""
    by_kind: dict[str, list[dict[str, Outcome]]] = {}
    plan_seconds: list[float] = []
    for cell in cells(quick=quick):
        names = planners if cell.kind != "free" else [name for name in planners if name not in UNPIPED]
        results = measure(cell, names, seeds)
        by_kind.setdefault(cell.kind, []).extend(results)
        if cell.stages == 4:
            plan_seconds += [result["elastic"].planning_seconds for result in results]
        head = f"{cell.kind:10} {cell.model:3} {cell.stages} stages {cell.sequences} x {cell.context // 1000}K {cell.corpus:9}"
        for name in names:
            own = [result[name] for result in results]
            if any(outcome.refusal for outcome in own):
                print(f"{head} {name:21} {own[0].refusal or own[-1].refusal}")
                continue
            parts = f"bubble {mean(o.bubble for o in own):6.1%}, recompute {mean(o.recompute for o in own):6.1%}, "
            parts += f"fixed {mean(o.fixed for o in own):6.1%}, {mean(o.chunks for o in own):5.0f} chunks, "
            print(
                f"{head} {name:21} {mean(o.over_ideal for o in own):6.3f} of ideal, {'' if name in UNPIPED else parts}"
                f"planned in {mean(o.planning_seconds for o in own):.2f} s",
                flush=True,
            )
    figures: dict[str, object] = {"plan_seconds": round(float(np.median(plan_seconds)), 3)}
    for kind, results in by_kind.items():
        elastic = [result["elastic"] for result in results]
        entry = {
            "elastic_over_ideal": geometric(o.over_ideal for o in elastic),
            "elastic_bubble": mean(o.bubble for o in elastic),
            "elastic_recompute": mean(o.recompute for o in elastic),
        }
        for key, name in (("paper", "elastic-paper"), ("fixed_chunk", "fixed-chunk"), ("packed", "packed-1f1b")):
            entry[f"speedup_vs_{key}"] = geometric(r[name].seconds / r["elastic"].seconds for r in results)
        paper = mean(r["elastic-paper"].over_ideal - 1 for r in results)
        entry["excess_over_paper_excess"] = mean(o.over_ideal - 1 for o in elastic) / paper
        for name in UNPIPED:
            if name in planners and kind != "free":
                entry[f"speedup_vs_{name}"] = geometric(r[name].seconds / r["elastic"].seconds for r in results)
        figures[kind] = {key: round(value, 4) for key, value in entry.items()}
    return figures


def random_draft(rng: random.Random) -> Draft:
    """A draft of a random model, batch and schedule."""
    stages = rng.choice([4, 8])
    cost = preset(rng.choice(["7b", "13b", "30b"]) + "-a100", stages)
    cell = Cell("calibrated", "7b", stages, rng.choice([128, 256, 512]), rng.choice([48, 96, 192]) * 1000, "lognormal")
    lengths = cell.lengths(rng.randrange(2**31))
    seconds = fit_slice_time(cost, max(lengths))
    slices = rng.choice([2, 4, 8, 16])
    chunking = balanced_chunking(lengths, range(len(lengths)), slices, seconds, token_capacity=sum(lengths))
    schedule = rng.choice(["1f1b", "tapered", "lookahead"])
    return Draft((chunking.ordered(),), cost, schedule, None if schedule == "1f1b" else forwards_ahead(stages, 2.0))


def solver_gap(count: int, *, against_exact: bool) -> dict[str, object]:
    """Gaps of the recompute solver on random tight problems against the certified bound of the linear relaxation.

    Feasibility is checked again on the memory curves, which the solver does not use. ``against_exact`` also runs the integer
    program, to a 2% gap or for 10 seconds, and says how the two compare.
    """
    rng = random.Random(0)
    gaps: list[float] = []
    seconds: list[float] = []
    many: list[float] = []
    proven: list[float] = []
    exact_gaps: list[float] = []
    exact_seconds: list[float] = []
    while len(gaps) < count:
        draft = random_draft(rng)
        least, most = draft.least()[0], max(draft.peaks(draft.uniform(0)))
        budget = int(least + rng.uniform(0.1, 0.8) * (most - least))
        problem = draft.problem(budget)
        began = time.process_time()
        solution = solve(problem)
        seconds.append(time.process_time() - began)
        assert max(draft.peaks(problem.layers(solution.values))) <= budget
        gaps.append(solution.gap)
        if solution.bound >= FEW_LAYERS:
            many.append(solution.gap)
        proven.append(close_gap(problem, solution).gap)
        if against_exact:
            began = time.process_time()
            exact = solve_exactly(problem, gap=0.02, time_limit=10.0)
            exact_seconds.append(time.process_time() - began)
            exact_gaps.append(exact.objective / solution.bound - 1 if solution.bound else 0.0)
    figures: dict[str, object] = {
        "problems": count,
        "median": round(float(np.median(gaps)), 4),
        "p95": round(float(np.percentile(gaps, 95)), 4),
        "worst": round(max(gaps), 4),
        f"worst_from_{FEW_LAYERS}_layers": round(max(many), 4),
        "worst_after_integer_program": round(max(proven), 4),
        "seconds_median": round(float(np.median(seconds)), 4),
        "seconds_worst": round(max(seconds), 4),
    }
    if against_exact:
        figures |= {
            "milp_median": round(float(np.median(exact_gaps)), 4),
            "milp_worst": round(max(exact_gaps), 4),
            "milp_seconds_median": round(float(np.median(exact_seconds)), 4),
            "milp_seconds_worst": round(max(exact_seconds), 4),
        }
    return figures


def sharing_price(count: int) -> dict[str, object]:
    """What sharing variables along diagonals costs: the free problem's layers and simulated step relative to the shared one's."""
    rng = random.Random(2)
    layers: list[float] = []
    steps: list[float] = []
    while len(layers) < count:
        draft = random_draft(rng)
        least, most = draft.least()[0], max(draft.peaks(draft.uniform(0)))
        budget = int(least + rng.uniform(0.1, 0.6) * (most - least))
        if draft.table.num_chunks > 150:
            continue
        shared, free = (draft.problem(budget, share_diagonals=share) for share in (True, False))
        recompute = [problem.layers(solve(problem).values) for problem in (shared, free)]
        layers.append(float(recompute[1].sum() / recompute[0].sum()))
        steps.append(draft.makespan(recompute[1]) / draft.makespan(recompute[0]))
    return {
        "problems": count,
        "free_over_shared_layers": round(geometric(layers), 4),
        "free_over_shared_step": round(geometric(steps), 4),
    }


def never_slower(count: int) -> dict[str, object]:
    """``elastic`` against ``elastic-paper`` on random small inputs, about half of them with a tight budget."""
    rng = random.Random(1)
    slower = tight = faster = faster_tight = refused = 0
    for _ in range(count):
        stages = rng.choice([2, 3, 4])
        cost = preset("7b-a100", stages, chunk_seconds=rng.choice([0.0, 0.02, 0.2]))
        number = rng.randint(1, 60)
        lengths = [min(64_000, 1 + int(math.exp(rng.gauss(7.0, 1.63)))) for _ in range(number)]
        wanted = PlannerSettings(max_slices=rng.choice([4, 8, 16]))
        is_tight = rng.random() < 0.6
        if is_tight:
            paper = plan_replica(lengths, range(number), cost, dataclasses.replace(wanted, planner="elastic-paper"))
            least, most = paper.draft.least()[0], max(paper.draft.peaks(paper.draft.uniform(0)))
            wanted = dataclasses.replace(wanted, memory_budget=int(least + rng.uniform(0.0, 0.5) * (most - least)))
        try:
            paper = plan_replica(lengths, range(number), cost, dataclasses.replace(wanted, planner="elastic-paper"))
        except BudgetError:
            refused += 1
            continue
        elastic = plan_replica(lengths, range(number), cost, wanted)
        ours, theirs = (found.draft.makespan(found.recompute) for found in (elastic, paper))
        slower += ours > theirs * (1 + 1e-12)
        faster += ours < theirs * (1 - 1e-9)
        tight += is_tight
        faster_tight += is_tight and ours < theirs * (1 - 1e-9)
    return {
        "inputs": count,
        "refused": refused,
        "slower": slower,
        "faster": faster,
        "tight": tight,
        "faster_of_tight": round(faster_tight / max(tight, 1), 3),
    }


def resident_cost(shape: ModelShape, layers: Sequence[int]) -> AnalyticCost:
    """The cost model of the shape on stages of eight devices that share its states and keep parameters gathered."""
    states = state_bytes(shape, layers, None, Holding(sequence_parallel=8))
    return flop_cost(shape, layers, flops_per_second=150e12, chunk_seconds=0.02, sequence_parallel=8, states=states)


def knowing_windows(*, quick: bool) -> dict[str, object]:
    """Steps of a model with sliding windows planned without knowing them over the same planned with, both simulated with them.

    The second figure of each case is the step that the planner predicts without knowing them over the simulated one.
    """
    figures: dict[str, object] = {}
    for stages, sequences in itertools.product((8,) if quick else (4, 8), (1, 4) if quick else (1, 4, 16)):
        layers = even_stages(WINDOWED.layers, stages)
        cost = resident_cost(WINDOWED, layers)
        unaware = dataclasses.replace(cost, shape=dataclasses.replace(WINDOWED, windows=()))
        lengths, settings = [131_072] * sequences, PlannerSettings(token_capacity=131_072, work_limit=100)
        plans = [plan_step(lengths, known, settings) for known in (unaware, cost)]
        steps = [simulate_plan(plan, cost)[0].makespan for plan in plans]
        predicted = simulate_plan(plans[0], unaware)[0].makespan
        ratios = steps[0] / steps[1], predicted / steps[0]
        figures[f"{stages}_stages_{sequences}_sequences"] = [round(ratio, 3) for ratio in ratios]
    return figures


def balancing(*, quick: bool) -> dict[str, object]:
    """Steps with evenly many layers a stage over steps with stages of equal time, without a memory budget and with one.

    The budget of both is that with which the even split has a quarter of what it can use beyond the least.
    """
    figures: dict[str, object] = {}
    for stages, sequences in itertools.product((4, 8), (128,) if quick else (128, 512)):
        lengths = Cell("resident", "7b", stages, sequences, 48_000, "lognormal").lengths(0)
        splits = even_stages(WIDE_HEAD.layers, stages), balanced_stages(WIDE_HEAD, stages, typical_length(lengths))
        costs = [resident_cost(WIDE_HEAD, layers) for layers in splits]
        free = PlannerSettings(token_capacity=48_000, work_limit=100)
        draft = plan_replica(
            lengths, range(sequences), costs[0], dataclasses.replace(free, planner="elastic-paper")
        ).draft
        least, most = draft.least()[0], max(draft.peaks(draft.uniform(0)))
        tight = dataclasses.replace(free, memory_budget=int(least + 0.25 * (most - least)))
        ratios = []
        for settings in (free, tight):
            even, balanced = (simulate_plan(plan_step(lengths, cost, settings), cost)[0].makespan for cost in costs)
            ratios.append(round(even / balanced, 3))
        figures[f"{stages}_stages_{sequences}_sequences"] = ratios
    return figures


def scaling(*, quick: bool) -> dict[str, object]:
    """CPU seconds of planning with more sequences and stages, and of a step of 1,024 devices."""
    figures: dict[str, object] = {}
    for stages, sequences in ((4, 128), (4, 512), (4, 2048), (8, 512)) if not quick else ((4, 128), (4, 512)):
        cell = Cell("resident", "13b", stages, sequences, 96_000, "lognormal")
        began = time.process_time()
        found = plan_replica(cell.lengths(0), range(sequences), cell.cost(), cell.settings())
        figures[f"{stages}_stages_{sequences}_sequences_{found.draft.table.num_chunks}_chunks"] = round(
            time.process_time() - began, 3
        )
    if not quick:
        cell = Cell("resident", "13b", 4, 16_384, 96_000, "lognormal")
        settings = dataclasses.replace(cell.settings(), replicas=32)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        began, own = time.perf_counter(), time.process_time()
        plan_step(cell.lengths(0), cell.cost(), settings, processes=2)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        workers = after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
        figures["1024_devices_16384_sequences_wall"] = round(time.perf_counter() - began, 2)
        figures["1024_devices_16384_sequences_cpu_of_2_cores"] = round(workers / 2 + time.process_time() - own, 2)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cells and planners, under 50 seconds")
    parser.add_argument("--seeds", type=int, default=1, help="batches per cell (1)")
    parser.add_argument("--random", type=int, help="random inputs of elastic against elastic-paper (30, else 1000)")
    parser.add_argument(
        "--planners", nargs="+", choices=(*planner_names(), *UNPIPED), help="planners beside the main ones"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run (everything)")
    options = parser.parse_args(arguments)
    quick = options.quick
    figures: dict[str, object] = {}
    if "planners" in options.parts:
        chosen = options.planners or ([] if quick else [*planner_names(), *UNPIPED])
        figures |= compare_planners(list(dict.fromkeys([*MAIN, *chosen])), quick=quick, seeds=options.seeds)
        resident = figures["resident"]
        assert isinstance(resident, dict)
        figures = {name: resident[name] for name in HEADLINES} | figures
    if "solver" in options.parts:
        figures["solver_gap"] = solver_gap(40 if quick else 100, against_exact=not quick)
        print(f"recompute solver: {figures['solver_gap']}", flush=True)
    if "sharing" in options.parts and not quick:
        figures["sharing"] = sharing_price(40)
        print(f"sharing along diagonals: {figures['sharing']}", flush=True)
    if "random" in options.parts:
        figures["never_slower"] = never_slower(options.random or (30 if quick else 1000))
        print(f"elastic against elastic-paper: {figures['never_slower']}", flush=True)
    if "scaling" in options.parts:
        figures["scaling"] = scaling(quick=quick)
        print(f"planning takes: {figures['scaling']}", flush=True)
    if "windows" in options.parts:
        figures["windows"] = knowing_windows(quick=quick)
        print(f"steps planned without knowing windows: {figures['windows']}", flush=True)
    if "balance" in options.parts:
        figures["balance"] = balancing(quick=quick)
        print(f"steps with evenly many layers a stage: {figures['balance']}", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
