"""The published evaluation of Elastic Pipeline Parallelism, by simulation: how its figures look under this cost model.

Assumptions, all of them:

* Cluster: 4 nodes of 8 devices; the pipelines use 4 stages of 8-way sequence parallelism, one node a stage.
* Times: the presets, which are a published calibration of a 7B model on A100 devices (attention, other work, all-to-all by group
  size), scaled by shape to 13B and 30B. The publication measured A800 devices, with slower links inside a node.
* Fixed cost of a micro-batch: planners without a pipeline shard parameters over all devices (ZeRO-3) and pay the calibration's
  fixed cost, which is gathering parameters and scattering gradients, for each one. Pipelines keep the parameters of their
  stage gathered, which costs their memory, and pay 4% of it (``infinipipe.cost.presets.RESIDENT_SHARE``).
* Memory: 72 GB of 80 for weights, gradients, optimizer states and activations; the calibration's activations per token. States are
  what this runtime holds: float32 masters and moments sharded over a stage, bfloat16 parameters gathered, float32 gradients
  accumulated whole or sharded, which costs a message for every layer of every chunk, whichever makes a planner's step the shorter.
* Lengths: lognormal with mu 7.0 and sigma 1.63, clipped to the context length, or drawn from the file of ``--lengths``.
* The baselines are at their best: ``fixed-chunk`` searches its chunk size and the uniform recompute that fits, for every batch;
  ``flexsp`` and ``ulysses-zero3`` their groups and micro-batches.
* Planning is not part of a step, as in the publication.

A ratio is the other planner's step time over ours, the mean over seeds. The last line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infinipipe.cost import AnalyticCost, GradientPolicy, Holding
from infinipipe.cost.policies import with_policies
from infinipipe.cost.presets import MODELS, preset, preset_network
from infinipipe.planner import PlannerSettings, planner_names
from infinipipe.planner.compare import UNPIPED, Outcome, compare
from infinipipe.planner.lengths import read_lengths
from infinipipe.timeline.figure import Box, Figure, Label, Lines, Shape
from infinipipe.timeline.png import to_png
from infinipipe.timeline.svg import to_svg
from infinipipe.timeline.themes import THEMES

STAGES = 4
SEQUENCE_PARALLEL = 8
BUDGET = 72_000_000_000
GRADIENTS: tuple[GradientPolicy, ...] = ("whole", "sharded")
OURS = ("elastic", "elastic-paper")
ABLATIONS = ("paper-unbalanced", "paper-no-recompute", "paper-full-recompute")
MAIN = (*OURS, *ABLATIONS, "fixed-chunk", *UNPIPED)

PUBLISHED: dict[str, str] = {
    "flexsp": "up to 1.69",
    "ulysses-zero3": "up to 2.07",
    "fixed-chunk at 48K": "up to 1.27",
    "fixed-chunk at 96K": "up to 1.40",
    "fixed-chunk over 64K-192K": "1.23 to 1.63",
    "bubble": "below 0.20",
    "paper-unbalanced": "about 1.12 (1.28 / 1.14 over FlexSP)",
    "paper-no-recompute": "about 1.07 (1.28 / 1.20)",
    "paper-full-recompute": "about 1.06 (1.28 / 1.21)",
}
"""The publication's figures by what they compare with."""


@dataclass(frozen=True)
class Cell:
    """One batch setting; ``context`` in thousands of tokens."""

    model: str
    context: int
    sequences: int

    def __str__(self) -> str:
        return f"{self.model.upper()} {self.context}K {self.sequences}"

    def cost(self, gradients: GradientPolicy) -> AnalyticCost:
        """The cost model of a stage's devices that keep its parameters gathered."""
        holding = Holding(sequence_parallel=SEQUENCE_PARALLEL, gradient_policy=gradients)
        cost = preset(f"{self.model}-a100", STAGES, sequence_parallel=SEQUENCE_PARALLEL, holding=holding)
        return with_policies(cost, MODELS[self.model], holding)

    def batch(self, seed: int, corpus: Sequence[int] | None) -> list[int]:
        """Lengths of a batch."""
        rng = np.random.default_rng(seed)
        if corpus is None:
            drawn = np.exp(rng.normal(7.0, 1.63, self.sequences)).astype(np.int64)
        else:
            drawn = rng.choice(np.array(corpus), self.sequences)
        return np.clip(drawn, 1, self.context * 1000).tolist()


def cells(*, quick: bool) -> list[Cell]:
    """The publication's settings, or some of each kind."""
    if quick:
        few = [
            ("7b", 48, 512),
            ("13b", 48, 512),
            ("30b", 48, 512),
            ("13b", 96, 512),
            ("13b", 192, 512),
            ("13b", 64, 512),
        ]
        return [Cell(*values) for values in few]
    grid = [Cell(model, context, 512) for model in ("7b", "13b", "30b") for context in (48, 96)]
    grid += [Cell("13b", context, 512) for context in (64, 128, 192)]
    return grid + [Cell("13b", 64, sequences) for sequences in (128, 256)]


Results = dict[Cell, list[dict[str, Outcome]]]


def study(
    chosen: Sequence[Cell], planners: Iterable[str], seeds: int, corpus: Sequence[int] | None, time_limit: float | None
) -> Results:
    """Outcomes by planner of every cell and seed; prints a line for each."""
    piped = [name for name in planners if name not in UNPIPED]
    results: Results = {}
    for cell in chosen:
        network = preset_network(f"{cell.model}-a100")
        settings = PlannerSettings(memory_budget=BUDGET, token_capacity=cell.context * 1000, time_limit=time_limit)
        runs = []
        for seed in range(seeds):
            lengths = cell.batch(seed, corpus)
            better: dict[str, Outcome] = {}
            for policy in GRADIENTS:
                cost = cell.cost(policy)
                found = compare(
                    lengths, cost, settings, (*piped, *UNPIPED), context=cell.context * 1000, network=network
                )
                for outcome in found:
                    best = better.setdefault(outcome.planner, outcome)
                    if best.refusal or outcome.seconds < best.seconds:
                        better[outcome.planner] = outcome
            runs.append(better)
        results[cell] = runs
        for name in [*piped, *UNPIPED]:
            seconds = mean(run[name].seconds for run in runs)
            line = f"{cell!s:15} {name:22}"
            if math.isnan(seconds):
                print(f"{line} no plan: {next(run[name].refusal for run in runs if run[name].refusal)}", flush=True)
                continue
            line += f" {seconds:8.2f} s {ratio(runs, name, 'elastic'):6.3f} of elastic"
            if name not in UNPIPED:
                line += f"  bubble {share(runs, name, 'bubble'):6.1%}  recompute {share(runs, name, 'recompute'):6.1%}"
            print(line, flush=True)
    return results


def mean(values: Iterable[float]) -> float:
    """The mean; NaN if a value is."""
    return statistics.fmean(values)


def ratio(runs: Sequence[dict[str, Outcome]], other: str, ours: str) -> float:
    """Mean over seeds of the other planner's step over ours; NaN if either has no plan."""
    return mean(run[other].seconds / run[ours].seconds for run in runs)


def share(runs: Sequence[dict[str, Outcome]], planner: str, part: str) -> float:
    """Mean share of the step that stages spend on a part, ``bubble`` or ``recompute``."""
    return mean(getattr(run[planner], part) / run[planner].over_ideal for run in runs)


def summary(results: Results) -> dict[str, dict[str, list[float]]]:
    """For each of our planners, the ratios behind every published figure, in the order of the cells."""
    selections = {
        "flexsp": (results, "flexsp"),
        "ulysses-zero3": (results, "ulysses-zero3"),
        "fixed-chunk at 48K": ([cell for cell in results if cell.context == 48], "fixed-chunk"),
        "fixed-chunk at 96K": ([cell for cell in results if cell.context == 96], "fixed-chunk"),
        "fixed-chunk over 64K-192K": ([cell for cell in results if cell.context >= 64], "fixed-chunk"),
    }
    table: dict[str, dict[str, list[float]]] = {}
    for ours in OURS:
        figures = {
            claim: [ratio(results[cell], other, ours) for cell in members]
            for claim, (members, other) in selections.items()
        }
        figures["bubble"] = [share(runs, ours, "bubble") for runs in results.values()]
        for part in ABLATIONS:
            figures[part] = [ratio(runs, part, ours) for cell, runs in results.items() if cell.model == "13b"]
        table[ours] = figures
    return table


def span(values: Sequence[float]) -> str:
    """The range of the values that are known."""
    known = [value for value in values if not math.isnan(value)]
    missing = len(values) - len(known)
    if not known:
        return "no plan fits"
    text = f"{min(known):.2f} to {max(known):.2f}"
    return text + (f" ({missing} of {len(values)} do not fit)" if missing else "")


def limits(values: Sequence[float]) -> list[float] | None:
    """The least and the largest of the values that are known."""
    known = [value for value in values if not math.isnan(value)]
    return [min(known), max(known)] if known else None


def markdown(results: Results) -> str:
    """The study as a document: assumptions, our figures beside the published ones, every step time."""
    table = summary(results)
    lines = ["# The published evaluation, by simulation", "", "Written by `benchmarks/paper.py`.", ""]
    assert __doc__ is not None
    lines += [__doc__[__doc__.index("Assumptions") : __doc__.rindex("The last line")].strip(), ""]
    lines += [
        "| other step time over ours; bubble: share of the step | published | elastic | elastic-paper |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {claim} | {published} | " + " | ".join(span(table[ours][claim]) for ours in OURS) + " |"
        for claim, published in PUBLISHED.items()
    ]
    names = list(next(iter(next(iter(results.values())))))
    lines += ["", "![step times](paper.svg)", "", "Seconds of a step; a dash where no plan fits:", ""]
    lines += ["| setting | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for cell, runs in results.items():
        seconds = [mean(run[name].seconds for run in runs) for name in names]
        lines.append(f"| {cell} | " + " | ".join("-" if math.isnan(s) else f"{s:.2f}" for s in seconds) + " |")
    return "\n".join(lines) + "\n"


BARS: dict[str, str] = {
    "elastic-paper": "#2a6fbb",
    "fixed-chunk": "#e08a1e",
    "paper-unbalanced": "#5b9a55",
    "flexsp": "#8a63b3",
    "ulysses-zero3": "#b34f4f",
}
"""Planners of the plot, and their colours."""
LEFT, TOP, HEIGHT, GROUP, BAR, LEGEND = 60.0, 62.0, 260.0, 112.0, 17.0, 140.0
TICK = 0.5


def plot(results: Results) -> Figure:
    """Bars: every cell's step time of the main planners over that of ``elastic``; a cross where no plan fits."""
    theme = THEMES["light"]
    text, muted = theme["text"], theme["muted"]
    values = {cell: {name: ratio(runs, name, "elastic") for name in BARS} for cell, runs in results.items()}
    known = [value for row in values.values() for value in row.values() if not math.isnan(value)]
    ticks = math.ceil(max(known, default=1.0) / TICK + 0.2)
    width = max(LEFT + GROUP * len(results), LEFT + LEGEND * len(BARS)) + 20

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - value / (ticks * TICK))

    shapes: list[Shape] = [Label(LEFT, 18, "step time over that of elastic, by simulation", text, 14, bold=True)]
    for number in range(ticks + 1):
        value = number * TICK
        shapes.append(Lines(((LEFT, y(value)), (width - 10, y(value))), text if value == 1 else theme["line"]))
        shapes.append(Label(LEFT - 8, y(value), f"{value:g}", muted, 11, "end"))
    for place, (name, color) in enumerate(BARS.items()):
        shapes += [Box(LEFT + place * LEGEND, 35, 10, 10, color), Label(LEFT + place * LEGEND + 15, 40, name, text, 11)]
    for place, (cell, row) in enumerate(values.items()):
        first = LEFT + place * GROUP + (GROUP - BAR * len(BARS)) / 2
        for number, (name, value) in enumerate(row.items()):
            x = first + number * BAR
            if math.isnan(value):
                shapes.append(Label(x + BAR / 2, y(0) - 8, "x", muted, 11, "middle"))
                continue
            title = f"{name}: {value:.3f}"
            shapes.append(Box(x + 1, y(value), BAR - 2, y(0) - y(value), BARS[name], title=title))
            shapes.append(Label(x + BAR / 2, y(value) - 7, f"{value:.2f}", text, 7.5, "middle"))
        shapes.append(Label(LEFT + (place + 0.5) * GROUP, y(0) + 14, str(cell), text, 11, "middle"))
    return Figure(width, TOP + HEIGHT + 34, theme["panel"], tuple(shapes))


def main() -> None:
    parser = argparse.ArgumentParser(description="The published evaluation, by simulation.")
    parser.add_argument("--quick", action="store_true", help="some settings, the main planners, one seed; under 50 s")
    parser.add_argument(
        "--lengths", help="file of sequence lengths to draw from, instead of the lognormal distribution"
    )
    parser.add_argument("--seeds", type=int, help="batches of every setting (3; quick 1)")
    parser.add_argument("--output", type=Path, help="folder for paper.md, paper.svg and paper.png")
    options = parser.parse_args()
    started = time.monotonic()
    corpus = None if options.lengths is None else read_lengths(options.lengths)
    results = study(
        cells(quick=options.quick),
        MAIN if options.quick else (*planner_names(), *UNPIPED),
        options.seeds or (1 if options.quick else 3),
        corpus,
        1.0 if options.quick else None,
    )
    table = summary(results)
    text = markdown(results)
    print(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        figure = plot(results)
        (options.output / "paper.md").write_text(text)
        (options.output / "paper.svg").write_text(to_svg(figure))
        (options.output / "paper.png").write_bytes(to_png(figure))
    figures = {ours: {claim: limits(values) for claim, values in claims.items()} for ours, claims in table.items()}
    print(json.dumps({"published": PUBLISHED, **figures, "seconds": time.monotonic() - started}))


if __name__ == "__main__":
    main()
