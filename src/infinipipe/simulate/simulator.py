"""A step before it runs: the timeline, memory and use of time that a cost model predicts for a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from infinipipe.cost import CostModel
from infinipipe.plan import Plan, PlanError, ReplicaPlan
from infinipipe.simulate.engine import Engine, Floats, Times
from infinipipe.simulate.memory import memory_curves
from infinipipe.timeline import Message, Source, Span, StageTime, Timeline, breakdown


@dataclass(frozen=True)
class Simulation:
    """One replica's simulated step.

    Attributes:
        timeline: actions, messages and memory curves.
        peaks: for every stage, the most bytes in use on a device.
    """

    timeline: Timeline
    peaks: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """Seconds of the step, without the optimizer's."""
        return self.timeline.makespan

    @cached_property
    def stages(self) -> tuple[StageTime, ...]:
        """Where each stage's time goes."""
        return breakdown(self.timeline)

    @property
    def bubble_fraction(self) -> float:
        """Share of all stages' time that is bubble or exposed communication; 0 for an empty step."""
        whole = self.makespan * len(self.stages)
        return math.fsum(s.bubble + s.communication for s in self.stages) / whole if whole else 0.0


def simulate(replica: ReplicaPlan, cost: CostModel, *, budget: int | None = None, name: str = "") -> Simulation:
    """Execute the action lists of one replica against ``cost``.

    ``budget``, in bytes per device, and ``name`` are only noted in the timeline. Raises ``PlanError`` if the action
    lists deadlock or the cost model is of other stages.
    """
    require_same_stages(replica, cost)
    table = cost.table(replica.chunks)
    recompute = table.recompute_seconds(replica.recompute)
    times = Engine(replica).times(table.seconds, table.message, recompute)
    curves = memory_curves(replica, times, table, cost)
    timeline = Timeline(
        source=Source.SIMULATED,
        pipelines=replica.pipelines,
        spans=_spans(replica, times, recompute),
        messages=_messages(replica, times),
        memory=tuple(tuple(zip(c.seconds.tolist(), c.size.tolist(), strict=True)) for c in curves),
        budget=budget,
        name=name,
        placement=replica.placement,
    )
    return Simulation(timeline, tuple(curve.peak for curve in curves))


def simulate_plan(plan: Plan, cost: CostModel, *, budget: int | None = None) -> tuple[Simulation, ...]:
    """Simulate every replica of a plan; the step takes as long as the slowest. Raises ``PlanError``."""
    if plan.stage_layers != tuple(cost.stage_layers):
        raise PlanError(
            f"the plan has stages of {list(plan.stage_layers)} layers, the cost model of {list(cost.stage_layers)}; "
            "use a cost model of the same stages"
        )
    names = [f"replica {index}" if len(plan.replicas) > 1 else "" for index in range(len(plan.replicas))]
    return tuple(
        simulate(replica, cost, budget=budget, name=name) for replica, name in zip(plan.replicas, names, strict=True)
    )


def require_same_stages(replica: ReplicaPlan, cost: CostModel) -> None:
    """Raise ``PlanError`` if a cost model is of other stages, or places the parts otherwise, than a replica's plan."""
    if replica.placement == cost.placement:
        return
    if replica.num_stages != cost.placement.num_stages:
        raise PlanError(
            f"the plan has {replica.num_stages} stages, but the cost model describes {cost.placement.num_stages}; "
            "use a cost model of the same stages"
        )
    plan, model = ([list(parts) for parts in placement.parts] for placement in (replica.placement, cost.placement))
    raise PlanError(
        f"the plan places the parts {plan} on its stages, the cost model {model}; use a cost model of the same placement"
    )


def _spans(replica: ReplicaPlan, times: Times, recompute: Floats) -> tuple[tuple[Span, ...], ...]:
    program = replica.program
    rows, again, parts = [], program.recomputes, program.part.tolist()
    for stage, actions in enumerate(replica.actions):
        starts, ends = times.start[stage].tolist(), times.end[stage].tolist()
        row = []
        for number, action, start, end in zip(
            range(program.base[stage], program.base[stage + 1]), actions, starts, ends, strict=True
        ):
            if again[number]:
                place = parts[number], action.chunk
                row.append(Span(action, start, end, float(recompute[place]), replica.recompute[place[0]][place[1]]))
            else:
                row.append(Span(action, start, end))
        rows.append(tuple(row))
    return tuple(rows)


def _messages(replica: ReplicaPlan, times: Times) -> tuple[Message, ...]:
    """All transfers, in order of their start."""
    program = replica.program
    ends, posted, transfer, arrival = (
        np.concatenate(x).tolist() for x in (times.end, times.posted, times.transfer, times.arrival)
    )
    messages = []
    for channel, makers, takers in program.links:
        border, direction = program.channels[channel].border, program.channels[channel].direction
        source, target = int(program.stage[makers[0]]), int(program.stage[takers[0]])
        for maker, taker in zip(makers.tolist(), takers.tolist(), strict=True):
            ready = max(posted[taker], ends[maker])
            chunk = int(program.chunk[taker])
            messages.append(Message(source, target, border, direction, chunk, ready, transfer[taker], arrival[taker]))
    messages.sort(key=lambda message: message.start)
    return tuple(messages)
