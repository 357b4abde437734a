"""``infinipipe simulate PLAN COST``: what a plan's step will take, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from infinipipe.cli.options import parse_options, require_output
from infinipipe.cost import AnalyticCost, CostModel
from infinipipe.cost.files import load_cost
from infinipipe.cost.loading import load_model
from infinipipe.cost.presets import preset
from infinipipe.plan import Plan, load
from infinipipe.plan.loading import is_reference
from infinipipe.planner.settings import GIB, MOST_GIB
from infinipipe.settings import SettingError, require_above, require_range
from infinipipe.simulate import Simulation, simulate_plan
from infinipipe.timeline import save
from infinipipe.timeline.units import readable_bytes, readable_seconds


@dataclass(frozen=True)
class SimulateOptions:
    """What to simulate.

    Attributes:
        plan: the plan file.
        cost: a cost file, the name of a preset such as 7b-a100, or a cost model of one's own as path/to/file.py:function.
        memory_budget: GiB that no device may exceed; noted in the timeline and compared with the peaks.
        sequence_parallel: devices of a stage, for a preset.
        replica: the data-parallel replica to show; the slowest if not given.
        output: where to write that replica's timeline, which 'infinipipe timeline' draws.
    """

    plan: str
    cost: str
    memory_budget: float | None = None
    sequence_parallel: int = 8
    replica: int | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        require_range("sequence_parallel", self.sequence_parallel, at_least=1)
        if self.memory_budget is not None:
            require_above("memory_budget", self.memory_budget, 0)
            require_range("memory_budget", self.memory_budget, at_most=MOST_GIB)
        require_output(self.output, (self.plan, self.cost))


def run(arguments: Sequence[str]) -> int:
    """Simulate a plan and print where its time and memory go."""
    options = parse_options(
        SimulateOptions, "simulate", "Execute a plan's action lists against a cost model.", arguments
    )
    plan = load(options.plan)
    plan.validate()
    budget = None if options.memory_budget is None else int(options.memory_budget * GIB)
    cost = named_cost(options.cost, plan, options.sequence_parallel)
    simulations = simulate_plan(plan, cost, budget=budget)
    shown = choose_replica(simulations, options.replica)
    if options.output is not None:
        save(simulations[shown].timeline, options.output)
    console = Console(highlight=False)
    if len(simulations) > 1:
        for index, simulation in enumerate(simulations):
            console.print(f"replica {index}: {readable_seconds(simulation.makespan)}")
    _report(console, simulations[shown])
    if isinstance(cost, AnalyticCost) and cost.optimizer:
        console.print(f"optimizer step, after it: {readable_seconds(cost.optimizer_seconds)}")
    if options.output is not None:
        console.print(f"timeline written to {options.output}; 'infinipipe timeline {options.output}' draws it")
    return 0


def named_cost(name: str, plan: Plan, sequence_parallel: int) -> CostModel:
    """The cost file of that name, the preset over the plan's stages, or the user's own. Raises ``CostError``, ``PlanError``."""
    if is_reference(name):
        return load_model(name, plan.placement)
    if Path(name).suffix or Path(name).exists():
        return load_cost(name)
    return preset(name, plan.stage_layers, sequence_parallel=sequence_parallel, placement=plan.placement)


def choose_replica(simulations: Sequence[Simulation], replica: int | None) -> int:
    """``replica`` if it is given, else the slowest. Raises ``SettingError`` if there is no such replica."""
    if replica is None:
        return max(range(len(simulations)), key=lambda index: simulations[index].makespan)
    if not 0 <= replica < len(simulations):
        raise SettingError(f"replica is {replica}, but the plan has {len(simulations)}, numbered from 0")
    return replica


def _report(console: Console, simulation: Simulation) -> None:
    """Print each stage's use of time, as shares of the step, and its peak memory."""
    makespan, budget = simulation.makespan, simulation.timeline.budget
    table = Table(title=f"step {readable_seconds(makespan)}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    shown = {
        name: title for name, title in COLUMNS.items() if name != "weight" or any(t.weight for t in simulation.stages)
    }
    for name in ("stage", *shown.values(), "peak\nmemory"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage, (times, peak) in enumerate(zip(simulation.stages, simulation.peaks, strict=True)):
        shares = [f"{getattr(times, name) / makespan if makespan else 0.0:.1%}" for name in shown]
        over = budget is not None and peak > budget
        table.add_row(str(stage), *shares, readable_bytes(peak) + ("\nover budget" if over else ""))
    console.print(table)
    console.print(f"bubble and exposed communication: {simulation.bubble_fraction:.1%} of all stages' time")


COLUMNS = {
    "forward": "forward",
    "backward": "backward",
    "weight": "weight\ngrads",
    "recompute": "recom-\npute",
    "communication": "exposed\nmessages",
    "warmup_bubble": "warm-up\nbubble",
    "steady_bubble": "steady\nbubble",
    "cooldown_bubble": "cool-\ndown\nbubble",
}
"""Heading of every share of a stage's time."""
