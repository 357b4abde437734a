"""A stage's memory over simulated time, from the cost model's bytes.

Held are: the states; every resource over its intervals (:meth:`infinipipe.plan.Program.intervals`); what an action needs while it
runs; a message's buffer at the receiver from the posting of the receive until the action takes it over, and at the sender until
the transfer ends; what a part hands over to another of its stage, in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infinipipe.cost import CostModel, CostTable
from infinipipe.plan import Program, ReplicaPlan
from infinipipe.plan.program import Booleans
from infinipipe.simulate.engine import Floats, Integers, Times


@dataclass(frozen=True)
class StageCurve:
    """Bytes in use on a device of the stage from each of ``seconds`` on, and the most ever in use."""

    seconds: Floats
    size: Integers
    peak: int


class _Ledger:
    """Changes of memory, ordered by time and, at one moment, by the order of the stage's actions.

    Changes at an action go before or after it, or with its start or end, in this order: a message is freed before what replaces
    it is allocated.
    """

    def __init__(self, times: Times) -> None:
        self._start, self._end = np.concatenate(times.start), np.concatenate(times.end)
        self._rows: list[tuple[Integers, Floats, Integers, Floats]] = []

    def add(self, number: Integers, seconds: Floats, rank: int, size: Floats) -> None:
        """Change by ``size`` at ``seconds``, among what happens around the actions of those numbers as ``rank`` says."""
        self._rows.append((number, seconds, 4 * number + rank, size))

    def before(self, number: Integers, seconds: Floats, size: Floats) -> None:
        self.add(number, seconds, 0, size)

    def at_start(self, number: Integers, size: Floats) -> None:
        self.add(number, self._start[number], 1, size)

    def at_end(self, number: Integers, size: Floats) -> None:
        self.add(number, self._end[number], 2, size)

    def after(self, number: Integers, seconds: Floats, size: Floats) -> None:
        self.add(number, seconds, 3, size)

    def curve(self, first: int, last: int, base: int) -> StageCurve:
        """The running sum from ``base`` on of what happens around the actions ``[first, last)``, those of a stage."""
        number, seconds, order, change = (np.concatenate(column) for column in zip(*self._rows, strict=True))
        own = (number >= first) & (number < last)
        seconds, order, change = seconds[own], order[own], change[own]
        ranked = np.lexsort((order, seconds))
        seconds = seconds[ranked]
        total = base + np.rint(np.cumsum(change[ranked])).astype(np.int64)
        last_of_moment = np.append(seconds[1:] > seconds[:-1], True)
        return StageCurve(seconds[last_of_moment], total[last_of_moment], int(max(base, total.max())))


def memory_curves(replica: ReplicaPlan, times: Times, table: CostTable, cost: CostModel) -> list[StageCurve]:
    """The memory curve of every stage."""
    program = replica.program
    if not program.num_actions:
        idle = [cost.state_bytes(stage) for stage in range(program.num_stages)]
        return [StageCurve(np.zeros(1), np.full(1, size, np.int64), size) for size in idle]
    ledger = _Ledger(times)
    layers = np.array(replica.recompute, np.int64)
    _messages(ledger, program, times, table)
    _resources(ledger, program, table, layers, np.concatenate(times.end))
    transient = program.by_kind(lambda column: table.transient_at(column, layers))
    everything = np.arange(program.num_actions)
    ledger.at_start(everything, transient)
    ledger.at_end(everything, -transient)
    base = program.base
    return [ledger.curve(base[s], base[s + 1], cost.state_bytes(s)) for s in range(program.num_stages)]


def _resources(ledger: _Ledger, program: Program, table: CostTable, layers: Integers, ends: Floats) -> None:
    held = table.held_at(layers)
    for intervals in program.intervals:
        size = held[intervals.resource.name][intervals.part, intervals.chunk]
        if intervals.resource.from_end:
            ledger.after(intervals.first, ends[intervals.first], size)
        else:
            ledger.at_start(intervals.first, size)
        ledger.at_end(intervals.last, -size)


def _messages(ledger: _Ledger, program: Program, times: Times, table: CostTable) -> None:
    """Buffers of posted receives, of inputs that a running action reads, and of outputs whose transfer has not ended."""
    keeps_input = program.rows("keeps_input")
    ends, posted, arrival = (np.concatenate(x) for x in (times.end, times.posted, times.arrival))
    for _, makers, takers in program.links:
        sizes = table.message_bytes[program.chunk[takers]]
        # A receive is posted between two actions: those after which, and before which, the stage comes to the use before it.
        first = program.base[int(program.stage[takers[0]])]
        ledger.before(np.maximum(program.post[takers] + 1, first), posted[takers], sizes)
        ledger.after(makers, ends[makers], sizes)
        ledger.after(makers, arrival[takers], -sizes)
        _taken(ledger, takers, sizes, keeps_input)
    for channel in np.flatnonzero(program.local).tolist():
        takers = np.flatnonzero(program.takes == channel)
        sizes = table.message_bytes[program.chunk[takers]]
        makers = program.source[takers]
        ledger.after(makers, ends[makers], sizes)
        _taken(ledger, takers, sizes, keeps_input)


def _taken(ledger: _Ledger, takers: Integers, sizes: Floats, keeps_input: Booleans) -> None:
    """An input belongs to what the action holds from its start, or is let go of at its end."""
    kept = keeps_input[takers]
    ledger.at_start(takers[kept], -sizes[kept])
    ledger.at_end(takers[~kept], -sizes[~kept])
