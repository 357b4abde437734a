"""Start and end of every action and message of a replica's action lists, for given durations.

The meaning is that of :mod:`infinipipe.plan.program`: a stage computes its actions in order, each once its input has arrived;
receives are posted ahead; sends never block computing; each channel carries one message at a time, first in, first out; a transfer
starts when its send and its receive are both posted. What parts of one stage hand over is there at once.

:class:`Engine` fixes the order of evaluation once per set of action lists, so that a search that only changes durations
pays for one pass over flat lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from infinipipe.plan import Program, ReplicaPlan

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Seconds = Mapping[str, Floats]
"""Seconds as (parts, chunks) by column of the cost table."""


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
        self.program: Program = replica.program
        order = self.program.order
        number = np.zeros(len(order) + 1, np.int64)
        number[order] = np.arange(1, len(order) + 1)
        self._order = order
        self._places = [number[first:last] for first, last in itertools.pairwise(self.program.base)]
        # What a part hands over to another of its stage costs no transfer: its maker comes before it in any case.
        self._is_sent = self.program.waits_for_link[order]
        self._previous: list[int] = number[self.program.previous[order]].tolist()
        self._post: list[int] = number[self.program.post[order]].tolist()
        self._before: list[int] = number[self.program.before[order]].tolist()
        self._source: list[int] = np.where(self._is_sent, number[self.program.source[order]], -1).tolist()

    def durations(self, seconds: Seconds, recompute: Floats | None = None) -> list[float]:
        """Seconds of every action, in order of evaluation; ``recompute`` as (parts, chunks) comes on top of actions that do."""
        own = self.program.by_kind(seconds.__getitem__)
        if recompute is not None:
            again = np.flatnonzero(self.program.recomputes)
            own[again] += recompute[self.program.part[again], self.program.chunk[again]]
        result: list[float] = own[self._order].tolist()
        return result

    def makespan(self, seconds: Seconds, message: ArrayLike, recompute: Floats | None = None) -> float:
        """Seconds from the start of the step to the end of its last action.

        ``seconds`` are those of the columns that occur, without recompute, ``message`` the seconds of a chunk's transfer as
        (chunks,), ``recompute`` what computing dropped layers again takes, as (parts, chunks).
        """
        end, _, _ = self._evaluate(seconds, message, recompute)
        return max(end)

    def times(self, seconds: Seconds, message: ArrayLike, recompute: Floats | None = None) -> Times:
        """Start and end of every action and message; arguments as in :meth:`makespan`."""
        ends, transfers, arrivals = (np.array(x) for x in self._evaluate(seconds, message, recompute))
        waits = np.append(False, self._is_sent)
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
        self, seconds: Seconds, message: ArrayLike, recompute: Floats | None
    ) -> tuple[list[float], list[float], list[float]]:
        """End of every action, and start and end of the transfer of its input; index 0 is the start of the step."""
        message_of: list[float] = np.asarray(message, np.float64)[self.program.chunk[self._order]].tolist()
        end, transfer, arrival = [0.0], [0.0], [0.0]
        add_end, add_transfer, add_arrival = end.append, transfer.append, arrival.append
        flat = zip(
            self._previous,
            self._source,
            self._post,
            self._before,
            message_of,
            self.durations(seconds, recompute),
            strict=True,
        )
        for previous, source, post, before, own_message, duration in flat:
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
                begin += own_message
                add_arrival(begin)
                if begin > start:
                    start = begin
            add_end(start + duration)
        return end, transfer, arrival
