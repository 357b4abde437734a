"""Start and end of every action and message of a replica's action lists, for given durations.

The meaning is that of :mod:`infinipipe.plan.communication`: a stage computes its actions in order, each once its input has
arrived; receives are posted ahead; sends never block computing; each direction of a link carries one message at a time,
first in, first out; a transfer starts when its send and its receive are both posted.

:class:`Engine` fixes the order of evaluation once per set of action lists, so that a search that only changes durations
pays for one pass over flat lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from infinipipe.plan import Action, ActionKind, ActionLists, Direction, PlanError, ReplicaPlan, check_deadlock
from infinipipe.plan.communication import receives_input, sends_output

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Times:
    """When everything happens, in seconds from the start of the step.

    Computing, for the action at ``[stage][position]``: ``start`` and ``end``. Messages, for the message that the action
    at ``[stage][position]`` waits for: ``posted`` (its receive), ``transfer`` (its transfer starts) and ``arrival``; NaN
    where the action waits for none.
    """

    start: tuple[Floats, ...]
    end: tuple[Floats, ...]
    posted: tuple[Floats, ...]
    transfer: tuple[Floats, ...]
    arrival: tuple[Floats, ...]

    @property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of the last action; 0 if there is none."""
        return max((float(end[-1]) for end in self.end if len(end)), default=0.0)


class Engine:
    """Evaluates the action lists of one replica for any durations.

    Actions are numbered in an order in which everything that one waits for has a lower number; number 0 is the start of
    the step. Raises ``PlanError`` if there is no such order (a deadlock) or messages cross.
    """

    def __init__(self, replica: ReplicaPlan) -> None:
        self.num_stages = replica.num_stages
        self.num_chunks = len(replica.chunks)
        programs = [_Program.of(actions, stage, replica.num_stages) for stage, actions in enumerate(replica.actions)]
        places = _evaluation_order(programs, replica.actions)
        if places is None:
            check_deadlock(replica)
            raise PlanError("the action lists name a message that no neighbour sends or receives")
        number = [np.zeros(len(actions) + 1, np.int64) for actions in replica.actions]
        for i, (stage, position) in enumerate(places):
            number[stage][position + 1] = i + 1
        self._places = [numbers[1:] for numbers in number]
        self._kind = np.array([_ROW[replica.actions[s][i].kind] for s, i in places], np.int64)
        self._stage = np.array([stage for stage, _ in places], np.int64)
        self._chunk = np.array([replica.actions[s][i].chunk for s, i in places], np.int64)
        self._previous = [int(number[s][i]) for s, i in places]
        self._source: list[int] = []
        self._post: list[int] = []
        self._before: list[int] = []
        for stage, position in places:
            needed = programs[stage].input_of[position]
            if needed is None:
                self._source.append(-1)
                self._post.append(0)
                self._before.append(0)
                continue
            direction, index = needed
            sender = stage - 1 if direction == Direction.FORWARD else stage + 1
            self._source.append(int(number[sender][programs[sender].sends[direction][index] + 1]))
            self._post.append(int(number[stage][programs[stage].posted_at(direction, index)]))
            uses = programs[stage].uses[direction]
            self._before.append(int(number[stage][uses[index - 1] + 1]) if index else 0)

    def durations(self, forward: ArrayLike, backward: ArrayLike) -> list[float]:
        """Seconds of every action, in order of evaluation, from ``[stage][chunk]`` tables."""
        tables = np.stack([np.asarray(forward, np.float64), np.asarray(backward, np.float64)])
        assert tables.shape == (2, self.num_stages, self.num_chunks), tables.shape
        result: list[float] = tables[self._kind, self._stage, self._chunk].tolist()
        return result

    def makespan(self, forward: ArrayLike, backward: ArrayLike, message: ArrayLike) -> float:
        """Seconds from the start of the step to the end of its last action.

        ``forward`` and ``backward`` are seconds as ``[stage][chunk]``, recompute included in backward; ``message`` is
        the seconds of a chunk's transfer as ``[chunk]``.
        """
        end, _, _ = self._evaluate(forward, backward, message)
        return max(end)

    def times(self, forward: ArrayLike, backward: ArrayLike, message: ArrayLike) -> Times:
        """Start and end of every action and message; arguments as in :meth:`makespan`."""
        ends, transfers, arrivals = (np.array(x) for x in self._evaluate(forward, backward, message))
        waits = np.array([False, *(source >= 0 for source in self._source)])
        posts = ends[[0, *self._post]]
        starts = np.maximum(ends[[0, *self._previous]], arrivals)
        by_stage = [
            tuple(values[numbers] for numbers in self._places)
            for values in (
                starts,
                ends,
                np.where(waits, posts, np.nan),
                np.where(waits, transfers, np.nan),
                np.where(waits, arrivals, np.nan),
            )
        ]
        return Times(*by_stage)

    def _evaluate(
        self, forward: ArrayLike, backward: ArrayLike, message: ArrayLike
    ) -> tuple[list[float], list[float], list[float]]:
        """End of every action, and start and end of the transfer of its input; index 0 is the start of the step."""
        message_of: list[float] = np.asarray(message, np.float64)[self._chunk].tolist()
        end, transfer, arrival = [0.0], [0.0], [0.0]
        add_end, add_transfer, add_arrival = end.append, transfer.append, arrival.append
        flat = zip(
            self._previous,
            self._source,
            self._post,
            self._before,
            message_of,
            self.durations(forward, backward),
            strict=True,
        )
        for previous, source, post, before, seconds, duration in flat:
            start = end[previous]
            if source < 0:
                add_transfer(0.0)
                add_arrival(0.0)
            else:
                begin = end[source]
                if end[post] > begin:
                    begin = end[post]
                if arrival[before] > begin:
                    begin = arrival[before]
                add_transfer(begin)
                begin += seconds
                add_arrival(begin)
                if begin > start:
                    start = begin
            add_end(start + duration)
        return end, transfer, arrival


def makespan(replica: ReplicaPlan, forward: ArrayLike, backward: ArrayLike, message: ArrayLike) -> float:
    """Seconds that the replica's action lists take; see :meth:`Engine.makespan`. Raises ``PlanError`` on a deadlock."""
    return Engine(replica).makespan(forward, backward, message)


_ROW = {ActionKind.FORWARD: 0, ActionKind.BACKWARD: 1}


@dataclass(frozen=True)
class _Program:
    """One stage's messages: what each action waits for, and positions of the actions that use and produce messages."""

    input_of: list[tuple[Direction, int] | None]
    uses: dict[Direction, list[int]]
    sends: dict[Direction, list[int]]

    @classmethod
    def of(cls, actions: Sequence[Action], stage: int, num_stages: int) -> _Program:
        program = cls([], {d: [] for d in Direction}, {d: [] for d in Direction})
        for position, action in enumerate(actions):
            needed = receives_input(action, stage, num_stages)
            if needed is None:
                program.input_of.append(None)
            else:
                program.input_of.append((needed, len(program.uses[needed])))
                program.uses[needed].append(position)
            sent = sends_output(action, stage, num_stages)
            if sent is not None:
                program.sends[sent].append(position)
        return program

    def posted_at(self, direction: Direction, index: int) -> int:
        """How many of the stage's actions end before the receive number ``index`` of ``direction`` is posted.

        The first receive is posted one action ahead of its use, every other one when the stage comes to the use before.
        """
        uses = self.uses[direction]
        return uses[index - 1] if index else max(uses[0] - 1, 0)


def _evaluation_order(programs: Sequence[_Program], actions: ActionLists) -> list[tuple[int, int]] | None:
    """(stage, position) of all actions, each after those it waits for; ``None`` if they deadlock or messages cross."""
    for stage, program in enumerate(programs[:-1]):
        below = programs[stage + 1]
        for sender, receiver, direction in (
            (stage, stage + 1, Direction.FORWARD),
            (stage + 1, stage, Direction.BACKWARD),
        ):
            source, target = (program, below) if direction == Direction.FORWARD else (below, program)
            sent = [actions[sender][i].chunk for i in source.sends[direction]]
            if sent != [actions[receiver][i].chunk for i in target.uses[direction]]:
                return None
    order: list[tuple[int, int]] = []
    reached = [0] * len(programs)
    ready = list(range(len(programs)))
    while ready:
        stage = ready.pop()
        position, program = reached[stage], programs[stage]
        while position < len(program.input_of):
            needed = program.input_of[position]
            if needed is not None:
                direction, index = needed
                sender = stage - 1 if direction == Direction.FORWARD else stage + 1
                if programs[sender].sends[direction][index] >= reached[sender]:
                    break
            order.append((stage, position))
            position += 1
        if position > reached[stage]:
            reached[stage] = position
            ready += [other for other in (stage - 1, stage + 1) if 0 <= other < len(programs)]
    return order if len(order) == sum(map(len, actions)) else None
