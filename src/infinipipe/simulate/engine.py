"""Start and end of every action and message of a replica's action lists, for given durations.

The meaning is that of :mod:`infinipipe.plan.communication`: a stage computes its actions in order, each once its input has
arrived; receives are posted ahead; sends never block computing; each direction of a link carries one message at a time,
first in, first out; a transfer starts when its send and its receive are both posted.

:class:`Engine` fixes the order of evaluation once per set of action lists, so that a search that only changes durations
pays for one pass over flat lists.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from infinipipe.plan import ActionKind, ActionLists, PlanError, ReplicaPlan, check_deadlock

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


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
        waits = _Waits.of(replica.actions)
        order = None if waits is None else waits.evaluation_order()
        if waits is None or order is None:
            check_deadlock(replica)
            raise PlanError("the action lists name a message that no neighbour sends or receives")
        number = np.zeros(len(order) + 1, np.int64)
        number[order] = np.arange(1, len(order) + 1)
        self._places = [number[first:last] for first, last in itertools.pairwise(waits.base)]
        self._kind = (~waits.is_forward[order]).astype(np.int64)
        self._stage = np.repeat(np.arange(self.num_stages), np.diff(waits.base))[order]
        self._chunk = waits.chunk[order]
        self._previous: list[int] = number[waits.previous[order]].tolist()
        self._post: list[int] = number[waits.post[order]].tolist()
        self._before: list[int] = number[waits.before[order]].tolist()
        source = waits.source[order]
        self._source: list[int] = np.where(source < 0, -1, number[source]).tolist()

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


@dataclass(frozen=True)
class _Waits:
    """What every action waits for. Actions are numbered stage by stage, from ``base[stage]`` on; -1 is the step's start.

    ``previous`` is the stage's action before, ``source`` the one that sends the input (-1: none is needed), ``post`` the one
    after which the input's receive is posted, and ``before`` the one that waits for the message before it on the same link.
    """

    base: list[int]
    is_forward: NDArray[np.bool_]
    chunk: Integers
    previous: Integers
    source: Integers
    post: Integers
    before: Integers

    @classmethod
    def of(cls, lists: ActionLists) -> _Waits | None:
        """The waits of action lists; ``None`` if messages between two stages do not pair up in order."""
        flat = [action for actions in lists for action in actions]
        base = [0, *itertools.accumulate(len(actions) for actions in lists)]
        is_forward = np.fromiter((action.kind is ActionKind.FORWARD for action in flat), np.bool_, len(flat))
        chunk = np.fromiter((action.chunk for action in flat), np.int64, len(flat))
        previous = np.arange(-1, len(flat) - 1)
        for first, last in itertools.pairwise(base):
            if first < last:
                previous[first] = -1
        source, post, before = np.full((3, len(flat)), -1)
        waits = cls(base, is_forward, chunk, previous, source, post, before)
        pairs = [(stage, stage + 1) for stage in range(len(lists) - 1)]
        if all(waits.link(a, b, forward=True) and waits.link(b, a, forward=False) for a, b in pairs):
            return waits
        return None

    def of_kind(self, stage: int, *, forward: bool) -> Integers:
        """Numbers of a stage's forwards, or backwards, in order."""
        first, last = self.base[stage], self.base[stage + 1]
        return first + np.flatnonzero(self.is_forward[first:last] == forward)

    def link(self, sender: int, receiver: int, *, forward: bool) -> bool:
        """Fill in the messages of one direction between two stages; ``False`` if they do not pair up in order.

        The first receive is posted one action ahead of its use, every other one when the stage comes to the use before.
        """
        sends, uses = self.of_kind(sender, forward=forward), self.of_kind(receiver, forward=forward)
        if not np.array_equal(self.chunk[sends], self.chunk[uses]):
            return False
        if len(uses):
            self.source[uses] = sends
            self.before[uses[1:]] = uses[:-1]
            self.post[uses[1:]] = self.previous[uses[:-1]]
            ahead = self.previous[uses[0]]
            self.post[uses[0]] = self.previous[ahead] if ahead >= 0 else -1
        return True

    def evaluation_order(self) -> Integers | None:
        """All actions, each after those it waits for; ``None`` if they deadlock."""
        num_stages = len(self.base) - 1
        source, reached, last = self.source.tolist(), self.base[:-1], self.base[1:]
        runs: list[Integers] = []
        ready = list(range(num_stages))
        while ready:
            stage = ready.pop()
            start = position = reached[stage]
            above = reached[stage - 1] if stage > 0 else 0
            below = reached[stage + 1] if stage + 1 < num_stages else 0
            first = self.base[stage]
            while position < last[stage]:
                sender = source[position]
                if sender >= 0 and sender >= (above if sender < first else below):
                    break
                position += 1
            if position > start:
                runs.append(np.arange(start, position))
                reached[stage] = position
                ready += [other for other in (stage - 1, stage + 1) if 0 <= other < num_stages]
        order = np.concatenate(runs) if runs else np.zeros(0, np.int64)
        return order if len(order) == len(self.chunk) else None
