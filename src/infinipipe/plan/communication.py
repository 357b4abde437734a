"""The communication pass: adds sends and receives, with their shapes, to a stage's action list; and the deadlock check.

Messages of one direction between two neighbouring stages are first in, first out. Every receive is posted one action of its
direction ahead of need, so that a transfer runs beside the computing that precedes its use. A send never waits.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from infinipipe.plan.types import Action, ActionKind, PlanError, ReplicaPlan


class Direction(enum.StrEnum):
    """Which way a message goes: activations to the next stage, gradients to the previous one."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of a chunk's input of ``num_tokens`` x hidden size."""

    direction: Direction
    chunk: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Send:
    """Start to send a chunk's output of ``num_tokens`` x hidden size."""

    direction: Direction
    chunk: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute an action, once its input, if it has one, has arrived."""

    action: Action


Operation = Receive | Send | Compute


def receives_input(action: Action, stage: int, num_stages: int) -> Direction | None:
    """The direction of the message that ``action`` needs at ``stage``, or ``None`` if it needs none."""
    if action.kind == ActionKind.FORWARD:
        return Direction.FORWARD if stage > 0 else None
    return Direction.BACKWARD if stage < num_stages - 1 else None


def sends_output(action: Action, stage: int, num_stages: int) -> Direction | None:
    """The direction of the message that ``action`` produces at ``stage``, or ``None`` if it produces none."""
    if action.kind == ActionKind.FORWARD:
        return Direction.FORWARD if stage < num_stages - 1 else None
    return Direction.BACKWARD if stage > 0 else None


def operations(replica: ReplicaPlan, stage: int) -> list[Operation]:
    """What ``stage`` does in order: its actions with receives posted ahead of need and sends after each producer."""
    num_stages, actions = replica.num_stages, replica.actions[stage]
    tokens = [chunk.num_tokens for chunk in replica.chunks]
    needs = {
        direction: [a.chunk for a in actions if receives_input(a, stage, num_stages) == direction]
        for direction in Direction
    }
    first_use = {
        direction: next((i for i, a in enumerate(actions) if receives_input(a, stage, num_stages) == direction), None)
        for direction in Direction
    }
    posted = dict.fromkeys(Direction, 0)
    result: list[Operation] = []

    def post(direction: Direction, count: int) -> None:
        while posted[direction] < min(count, len(needs[direction])):
            chunk = needs[direction][posted[direction]]
            result.append(Receive(direction, chunk, tokens[chunk]))
            posted[direction] += 1

    used = dict.fromkeys(Direction, 0)
    for i, action in enumerate(actions):
        for direction in Direction:
            first = first_use[direction]
            if first is not None and i >= first - 1:
                post(direction, used[direction] + 1)
        needed = receives_input(action, stage, num_stages)
        if needed is not None:
            used[needed] += 1
            post(needed, used[needed] + 1)
        result.append(Compute(action))
        sent = sends_output(action, stage, num_stages)
        if sent is not None:
            result.append(Send(sent, action.chunk, tokens[action.chunk]))
    return result


def check_deadlock(replica: ReplicaPlan) -> None:
    """Replay all stages under rendezvous: a message passes when both its send and its receive are posted, in FIFO order.

    Raises ``PlanError`` naming what every stuck stage waits for.
    """
    num_stages = replica.num_stages
    programs = [operations(replica, stage) for stage in range(num_stages)]
    _check_order(programs)
    position = [0] * num_stages
    sent: dict[tuple[int, Direction], set[int]] = {}
    progress = True
    while progress:
        progress = False
        for stage, program in enumerate(programs):
            while position[stage] < len(program):
                operation = program[position[stage]]
                if isinstance(operation, Compute):
                    needed = receives_input(operation.action, stage, num_stages)
                    if needed is not None:
                        source = stage - 1 if needed == Direction.FORWARD else stage + 1
                        if operation.action.chunk not in sent.get((source, needed), ()):
                            break
                elif isinstance(operation, Send):
                    sent.setdefault((stage, operation.direction), set()).add(operation.chunk)
                position[stage] += 1
                progress = True
    stuck = [stage for stage in range(num_stages) if position[stage] < len(programs[stage])]
    if stuck:
        waits = []
        for stage in stuck:
            operation = programs[stage][position[stage]]
            assert isinstance(operation, Compute)
            waits.append(f"stage {stage} at {operation.action}")
        raise PlanError(f"the action lists deadlock: {', '.join(waits)} wait for inputs that are never sent")


def _check_order(programs: Sequence[Sequence[Operation]]) -> None:
    """Receives of a direction must be posted in the order in which the neighbour sends. Raises ``PlanError``."""
    num_stages = len(programs)
    for stage in range(num_stages):
        for direction in Direction:
            source = stage - 1 if direction == Direction.FORWARD else stage + 1
            if not 0 <= source < num_stages:
                continue
            posted = [o.chunk for o in programs[stage] if isinstance(o, Receive) and o.direction == direction]
            sent = [o.chunk for o in programs[source] if isinstance(o, Send) and o.direction == direction]
            for i, (a, b) in enumerate(zip(sent, posted, strict=False)):
                if a != b:
                    raise PlanError(
                        f"messages cross: stage {source} sends chunk {a} as its {direction.value} message number {i}, "
                        f"but stage {stage} receives chunk {b} there; both stages must use the same order"
                    )
            if len(sent) != len(posted):
                raise PlanError(
                    f"stage {source} sends {len(sent)} {direction.value} messages, stage {stage} receives {len(posted)}"
                )
