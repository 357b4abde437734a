"""A step before it runs: the timeline, memory and use of time that a cost model predicts for a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from infinipipe.cost import CostModel, tabulate
from infinipipe.plan import ActionKind, Direction, Plan, PlanError, ReplicaPlan
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
    if len(cost.stage_layers) != replica.num_stages:
        raise PlanError(
            f"the plan has {replica.num_stages} stages, but the cost model describes {len(cost.stage_layers)}; "
            "use a cost model of the same stages"
        )
    table = tabulate(cost, replica.chunks)
    recompute = table.recompute_seconds(replica.recompute)
    times = Engine(replica).times(table.forward, table.backward + recompute, table.message)
    curves = memory_curves(replica, times, table, cost)
    timeline = Timeline(
        source=Source.SIMULATED,
        pipelines=replica.pipelines,
        spans=_spans(replica, times, recompute),
        messages=_messages(replica, times),
        memory=tuple(tuple(zip(c.seconds.tolist(), c.size.tolist(), strict=True)) for c in curves),
        budget=budget,
        name=name,
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


def _spans(replica: ReplicaPlan, times: Times, recompute: Floats) -> tuple[tuple[Span, ...], ...]:
    rows = []
    for stage, actions in enumerate(replica.actions):
        seconds, layers = recompute[stage].tolist(), replica.recompute[stage]
        starts, ends = times.start[stage].tolist(), times.end[stage].tolist()
        rows.append(
            tuple(
                Span(action, start, end)
                if action.kind is ActionKind.FORWARD
                else Span(action, start, end, seconds[action.chunk], layers[action.chunk])
                for action, start, end in zip(actions, starts, ends, strict=True)
            )
        )
    return tuple(rows)


def _messages(replica: ReplicaPlan, times: Times) -> tuple[Message, ...]:
    """All transfers, in order of their start."""
    ends = [
        dict(zip(actions, row.tolist(), strict=True)) for actions, row in zip(replica.actions, times.end, strict=True)
    ]
    messages = []
    for stage, actions in enumerate(replica.actions):
        columns = (times.posted[stage].tolist(), times.transfer[stage].tolist(), times.arrival[stage].tolist())
        for action, posted, transfer, arrival in zip(actions, *columns, strict=True):
            if math.isnan(arrival):
                continue
            is_forward = action.kind is ActionKind.FORWARD
            source = stage - 1 if is_forward else stage + 1
            direction = Direction.FORWARD if is_forward else Direction.BACKWARD
            ready = max(posted, ends[source][action])
            messages.append(Message(source, direction, action.chunk, ready, transfer, arrival))
    messages.sort(key=lambda message: message.start)
    return tuple(messages)
