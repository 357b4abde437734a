"""``infinipipe plan LENGTHS MODEL``: the plan of a step, what it will cost, and how other planners would do."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from infinipipe.cli.models import read_footprint
from infinipipe.cli.options import parse_options, require_output
from infinipipe.cost import (
    AnalyticCost,
    CostError,
    CostModel,
    GatherPolicy,
    GradientPolicy,
    Holding,
    balanced_stages,
    flop_cost,
    state_bytes,
    typical_length,
)
from infinipipe.cost.files import load_cost
from infinipipe.cost.loading import load_model
from infinipipe.cost.network import Network
from infinipipe.cost.presets import preset, preset_names, preset_network
from infinipipe.plan import ChunkKind, Placement, Plan, PlanError, cut_sequences, num_splits, placement_named, save
from infinipipe.plan.loading import is_reference
from infinipipe.planner import PlannerChoices, PlannerSettings, plan_step, replica_peaks
from infinipipe.planner.compare import UNPIPED, Outcome, compare, ideal_seconds
from infinipipe.planner.lengths import read_lengths
from infinipipe.simulate import simulate_plan
from infinipipe.timeline.units import readable_bytes
from infinipipe.train.settings import PlanSettings

MOST_CHUNK_SECONDS = 86_400
STAGES = 4
SEQUENCE_PARALLEL = 8
FLOPS_PER_SECOND = 100e12


@dataclass(frozen=True)
class PlanOptions(PlannerChoices):
    """What to plan.

    Attributes:
        lengths: sequence lengths: a file with one a line, a JSON list, a NumPy array, or the folder of a tokenized corpus.
        model: a preset such as 7b-a100, a cost file, a Hugging Face config.json or its folder, or a cost model of one's own as path/to/file.py:function.
        stages: pipeline stages; the parts of a Hugging Face configuration take equal time, those of a preset equally many layers; 4 if not given, or those of the cost file, which has no others.
        placement: which parts of the model (virtual stages) lie on which stage: plain, one on each; interleaved, part k on stage k mod stages; v, there and back; that of the cost file, which has no other.
        parts_per_stage: parts on each stage; if not given, 1 where the placement is plain, else 2.
        sequence_parallel: devices that share a stage's tokens; 8 if not given, or those of the cost file, which has no others.
        dtype: of the computing, for a Hugging Face configuration only; bfloat16 if not given.
        gather_policy: whether the parameters of a stage, where devices share them, stay gathered through a step (keep, if not given) or are released after each use; not with a cost file.
        gradient_policy: whether gradients, where devices share a stage, accumulate whole (if not given) or sharded, which takes less memory and a message for every layer of every chunk; not with a cost file.
        batch: sequences of a step, drawn with seed; all if not given.
        seed: of the draw.
        context: longest sequence; longer ones are clipped to it.
        replicas: data-parallel replicas.
        time_limit: seconds after which the search returns its best plan so far.
        chunk_seconds: fixed cost of a chunk over all stages; if not given, the preset's, or for a Hugging Face configuration 0.02, as in training; not with a cost file, which has its own.
        flops_per_second: what one device reaches; for a Hugging Face configuration only, 1e14 if not given.
        output: where to write the plan.
        compare: print all planners side by side.
    """

    lengths: str
    model: str
    stages: int | None = None
    placement: Literal["plain", "interleaved", "v"] | None = None
    parts_per_stage: int | None = None
    sequence_parallel: int | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    gather_policy: GatherPolicy | None = None
    gradient_policy: GradientPolicy | None = None
    batch: int | None = None
    seed: int = 0
    context: int | None = None
    replicas: int = 1
    time_limit: float | None = None
    chunk_seconds: float | None = None
    flops_per_second: float | None = None
    output: str | None = None
    compare: bool = False

    def __post_init__(self) -> None:
        for name in ("stages", "parts_per_stage", "sequence_parallel", "batch", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} is {value}; it must be at least 1")
        _ = self.placed
        if self.chunk_seconds is not None and not 0 <= self.chunk_seconds <= MOST_CHUNK_SECONDS:
            raise PlanError(f"chunk_seconds is {self.chunk_seconds}; it must be from 0 to {MOST_CHUNK_SECONDS}")
        if self.flops_per_second is not None and self.flops_per_second < 1:
            raise PlanError(f"flops_per_second is {self.flops_per_second}; it must be at least 1")
        if self.seed < 0:
            raise PlanError(f"seed is {self.seed}; it must be at least 0")
        read = (self.lengths, Path(self.lengths) / "index.npz", self.model, Path(self.model) / "config.json")
        require_output(self.output, (*read, self.planner, self.schedule))

    @property
    def placed(self) -> Placement:
        """The parts of every stage, for a model without a cost file. Raises ``PlanError``."""
        name = self.placement or "plain"
        try:
            return placement_named(name, self.stages or STAGES, self.parts_per_stage or (1 if name == "plain" else 2))
        except ValueError as error:
            raise PlanError(f"placement with parts_per_stage: {error}") from None

    @property
    def holding(self) -> Holding:
        """How the devices of a stage hold its states, for a model without a cost file."""
        return Holding(
            element_bytes=4 if self.dtype == "float32" else 2,
            sequence_parallel=self.sequence_parallel or SEQUENCE_PARALLEL,
            replicas=self.replicas,
            gather_policy=self.gather_policy or "keep",
            gradient_policy=self.gradient_policy or "whole",
        )


def run(arguments: Sequence[str]) -> int:
    """Plan a step, print the summary, write the plan."""
    options = parse_options(PlanOptions, "plan", "Plan one step over sequences of given lengths.", arguments)
    settings = options.planner_settings(replicas=options.replicas, time_limit=options.time_limit)
    lengths = batch_lengths(options)
    cost = read_cost(options, lengths)
    if options.compare and not isinstance(cost, AnalyticCost):
        raise PlanError(
            f"compare sets planners beside the ideal step, which the cost model {options.model} does not know; omit --compare"
        )
    console = Console(highlight=False)
    console.print(devices_line(cost, settings))
    plan = plan_step(lengths, cost, settings)
    summarise(console, plan, cost, settings, options.context)
    if options.output is not None:
        save(plan, options.output)
        console.print(f"plan written to {options.output}")
    if options.compare and isinstance(cost, AnalyticCost):
        if options.replicas > 1:
            console.print("planners are compared on the whole batch as one replica")
        network = preset_network(options.model) if options.model in preset_names() else Network.of(cost)
        outcomes = compare(lengths, cost, settings, context=options.context, network=network)
        print_comparison(console, outcomes)
        console.print(
            f"a chunk costs pipelines {cost.chunk_seconds():.3f} s over all stages{policies(options)}, a micro-batch those without "
            f"one {network.micro_batch_seconds:.3f} s, since they gather the whole model's parameters for each"
        )
    return 0


def policies(options: PlanOptions) -> str:
    """The policies that decide the price of a chunk, for a model that heeds them."""
    if is_reference(options.model) or (Path(options.model).is_file() and Path(options.model).name != "config.json"):
        return ""
    return f" (gather_policy {options.holding.gather_policy})"


def read_cost(options: PlanOptions, lengths: Sequence[int]) -> CostModel:
    """The cost model that ``options.model`` names, for a step over ``lengths``.

    Raises ``CostError``, also for an option that such a model does not heed, and ``PlanError`` for one of the user's own that will not do.
    """
    path, placement = Path(options.model), options.placed
    if is_reference(options.model):
        for name in (
            "sequence_parallel",
            "chunk_seconds",
            "flops_per_second",
            "dtype",
            "gather_policy",
            "gradient_policy",
        ):
            _require_unset(options, name, f"cost model {options.model}")
        return load_model(options.model, placement)
    sequence_parallel = options.sequence_parallel or SEQUENCE_PARALLEL
    if options.model in preset_names():
        for name in ("flops_per_second", "dtype"):
            _require_unset(options, name, f"preset {options.model}")
        return preset(
            options.model,
            placement.num_parts,
            sequence_parallel=sequence_parallel,
            chunk_seconds=options.chunk_seconds,
            placement=placement,
            holding=options.holding,
        )
    if not path.exists():
        raise CostError(
            f"model {options.model!r} is neither a file nor a preset; presets are {', '.join(preset_names())}"
        )
    if path.is_dir() or path.name == "config.json":
        known = read_footprint(path, options.dtype)
        shape = known.shape
        stage_layers = balanced_stages(shape, placement.num_parts, typical_length(lengths))
        return flop_cost(
            shape,
            stage_layers,
            flops_per_second=options.flops_per_second or FLOPS_PER_SECOND,
            chunk_seconds=PlanSettings.chunk_seconds if options.chunk_seconds is None else options.chunk_seconds,
            sequence_parallel=sequence_parallel,
            element_bytes=options.holding.element_bytes,
            states=state_bytes(shape, stage_layers, placement, options.holding),
            placement=placement,
            layers=known.layers,
        )
    cost = load_cost(path)
    for name in ("chunk_seconds", "flops_per_second", "dtype", "gather_policy", "gradient_policy"):
        _require_unset(options, name, f"cost file {path}")
    for name, own in (("stages", cost.num_stages), ("sequence_parallel", cost.sequence_parallel)):
        if getattr(options, name) not in (None, own):
            raise CostError(
                f"{name} is {getattr(options, name)}, but the cost file {path} is of {name} {own}; omit --{name}, or "
                f"profile for {getattr(options, name)}"
            )
    if (options.placement or options.parts_per_stage) and replace(
        options, stages=cost.num_stages
    ).placed != cost.placement:
        raise CostError(
            f"the cost file {path} places the parts {[list(parts) for parts in cost.placement.parts]} on its stages; omit "
            "--placement and --parts_per_stage, or profile for these"
        )
    return cost


def _require_unset(options: PlanOptions, name: str, model: str) -> None:
    if getattr(options, name) is not None:
        raise CostError(f"{name} is {getattr(options, name)}, but the {model} has its own; omit --{name}")


def batch_lengths(options: PlanOptions) -> list[int]:
    """The step's lengths: all of the file's, or a random batch, clipped to the context."""
    lengths = read_lengths(options.lengths)
    if options.batch is not None and options.batch > len(lengths):
        raise PlanError(
            f"batch is {options.batch}, but {options.lengths} has {len(lengths)} lengths; use at most so many, or omit --batch for all"
        )
    if options.batch is not None:
        chosen = np.random.default_rng(options.seed).permutation(len(lengths))[: options.batch]
        lengths = [lengths[i] for i in chosen.tolist()]
    return lengths if options.context is None else [min(length, options.context) for length in lengths]


def devices_line(cost: CostModel, settings: PlannerSettings) -> str:
    """What the plan is for."""
    stages, replicas = cost.placement.num_stages, settings.replicas
    shared = cost.sequence_parallel if isinstance(cost, AnalyticCost) else 1
    count = f"{replicas} replica{'s' if replicas > 1 else ''} of {stages} stage{'s' if stages > 1 else ''}"
    return f"planning for {stages * replicas * shared} devices: {count}, {shared} devices each (sequence_parallel {shared})"


def summarise(
    console: Console, plan: Plan, cost: CostModel, settings: PlannerSettings, context: int | None = None
) -> None:
    """Print what the plan is made of, what its step takes and what memory it needs."""
    for index, (replica, simulation) in enumerate(zip(plan.replicas, simulate_plan(plan, cost), strict=True)):
        if len(plan.replicas) > 1:
            console.print(f"replica {index}")
        kinds = Counter(chunk.kind for chunk in replica.chunks)
        cuts = cut_sequences(replica.chunks)
        tokens = sum(chunk.num_tokens for chunk in replica.chunks)
        console.print(
            f"{tokens:,} tokens in {len(replica.chunks)} chunks: "
            + ", ".join(f"{kinds[kind]} {kind.value}" for kind in ChunkKind)
            + f"; {len(cuts)} sequences cut, the most finely into {num_splits(replica.chunks)} slices; "
            f"{len(replica.pipelines)} pipeline{'s' if len(replica.pipelines) != 1 else ''}"
        )
        if not replica.chunks:
            continue
        lengths = [plan.lengths[i] for i in sorted({s.sequence for chunk in replica.chunks for s in chunk.slices})]
        over_ideal = ""
        if isinstance(cost, AnalyticCost):
            ideal = ideal_seconds(cost, lengths, settings.token_capacity or context or max(lengths))
            over_ideal = f", {simulation.makespan / ideal:.3f} of the ideal"
        recompute = sum(stage.recompute for stage in simulation.stages) / len(simulation.stages)
        console.print(
            f"step {simulation.makespan:.3f} s{over_ideal}; "
            f"bubble {simulation.bubble_fraction:.1%}, recompute {recompute / simulation.makespan:.1%}"
        )
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("stage", "layers", "recomputed layers", "peak memory", "of the budget"):
            table.add_column(name, justify="right")
        for stage, peak in enumerate(replica_peaks(replica, cost)):
            parts = plan.placement.parts[stage]
            layers = sum(plan.stage_layers[part] for part in parts)
            share = sum(sum(replica.recompute[part]) for part in parts) / max(1, layers * len(replica.chunks))
            used = "" if settings.memory_budget is None else f"{peak / settings.memory_budget:.1%}"
            listed = "+".join(str(plan.stage_layers[part]) for part in parts)
            table.add_row(str(stage), listed, f"{share:.1%}", readable_bytes(peak, round_up=True), used)
        console.print(table)


def print_comparison(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print planners by step time, those without a plan last."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("planner", "step", "/ideal", "bubble", "recomp.", "fixed", "chunks", "gap", "planned"):
        table.add_column(name, justify="left" if name == "planner" else "right", no_wrap=True)
    for outcome in sorted(outcomes, key=lambda o: (bool(o.refusal), o.seconds)):
        if outcome.refusal:
            table.add_row(outcome.planner, "-")
            continue
        shares = [outcome.bubble, outcome.recompute, outcome.fixed, outcome.gap]
        bubble, recompute, fixed, gap = ("" if np.isnan(share) else f"{share:.1%}" for share in shares)
        chunks = "" if outcome.planner in UNPIPED else str(outcome.chunks)
        row = (f"{outcome.seconds:.3f} s", f"{outcome.over_ideal:.3f}", bubble, recompute, fixed, chunks, gap)
        table.add_row(outcome.planner, *row, f"{outcome.planning_seconds:.2f} s")
    console.print(table)
    for outcome in outcomes:
        if outcome.refusal:
            console.print(f"{outcome.planner}: {outcome.refusal}")
    console.print(
        "shares are of the ideal step; gap is the recompute solver's to its bound; "
        f"{' and '.join(UNPIPED)} have no pipeline and no plan"
    )


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:]))
    except ValueError as error:
        print(f"infinipipe: error: {error}", file=sys.stderr)
        sys.exit(2)
