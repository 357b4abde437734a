"""A stage's memory over simulated time, from the cost model's bytes.

Held are: the states; a chunk's activations from the start of its forward to the end of its backward; key/value stores
and their gradients over the intervals of section 3; what an action needs while it runs; a message's buffer at the receiver
from the posting of the receive until the action takes it over, and at the sender until the transfer ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infinipipe.cost import CostModel, CostTable
from infinipipe.plan import ReplicaPlan, cut_sequences
from infinipipe.simulate.engine import Floats, Integers, Times
from infinipipe.simulate.positions import Positions


@dataclass(frozen=True)
class StageCurve:
    """Bytes in use on a device of the stage from each of ``seconds`` on, and the most ever in use."""

    seconds: Floats
    size: Integers
    peak: int


def memory_curves(replica: ReplicaPlan, times: Times, table: CostTable, cost: CostModel) -> list[StageCurve]:
    """The memory curve of every stage."""
    places = [Positions.of(actions) for actions in replica.actions]
    buffers = np.array([cost.message_bytes(chunk.num_tokens) for chunk in replica.chunks], np.int64)
    return [_stage_curve(stage, replica, places, times, table, cost, buffers) for stage in range(replica.num_stages)]


class _Ledger:
    """Changes of memory, ordered by time and, at one moment, by the order of the stage's actions."""

    def __init__(self, start: Floats, end: Floats) -> None:
        self._start = start
        self._end = end
        self._rows: list[tuple[Floats, Integers, Floats]] = []

    def before(self, position: Integers, seconds: Floats, size: Floats) -> None:
        """Change by ``size`` at ``seconds``, between the actions before ``position`` and the one there."""
        self._rows.append((seconds, 4 * position, size))

    def at_start(self, position: Integers, size: Floats) -> None:
        self._rows.append((self._start[position], 4 * position + 1, size))

    def at_end(self, position: Integers, size: Floats) -> None:
        self._rows.append((self._end[position], 4 * position + 2, size))

    def after(self, position: Integers, seconds: Floats, size: Floats) -> None:
        """Change by ``size`` at ``seconds``, once the action at ``position`` has ended."""
        self._rows.append((seconds, 4 * position + 3, size))

    def curve(self, base: int) -> StageCurve:
        """The running sum from ``base`` on."""
        seconds, order, change = (np.concatenate(column) for column in zip(*self._rows, strict=True))
        ranked = np.lexsort((order, seconds))
        seconds = seconds[ranked]
        total = base + np.rint(np.cumsum(change[ranked])).astype(np.int64)
        last_of_moment = np.append(seconds[1:] > seconds[:-1], True)
        return StageCurve(seconds[last_of_moment], total[last_of_moment], int(max(base, total.max())))


def _stage_curve(
    stage: int,
    replica: ReplicaPlan,
    places: Sequence[Positions],
    times: Times,
    table: CostTable,
    cost: CostModel,
    buffers: Integers,
) -> StageCurve:
    states = cost.state_bytes(stage)
    if not replica.chunks:
        return StageCurve(np.zeros(1), np.full(1, states, np.int64), states)
    forward, backward = places[stage].forward_at, places[stage].backward_at
    layers = np.array(replica.recompute[stage], np.int64)
    everything = layers >= table.stage_layers[stage]
    ledger = _Ledger(times.start[stage], times.end[stage])

    _messages(ledger, stage, places, times, buffers)
    activation = table.activation[stage] - layers * table.layer_saving[stage]
    ledger.at_start(forward, activation)
    ledger.at_end(backward, -activation)
    for position, kept, full in (
        (forward, table.forward_transient, table.forward_transient_full),
        (backward, table.backward_transient, table.backward_transient_full),
    ):
        transient = np.where(everything, full[stage], kept[stage])
        ledger.at_start(position, transient)
        ledger.at_end(position, -transient)
    for held in cut_sequences(replica.chunks).values():
        first, last = held[0], held[-1]
        store = np.array([cost.kv_bytes(replica.chunks[first].slices[0].length, stage)], np.float64)
        gradients = np.array([cost.dkv_bytes(replica.chunks[last].context, stage)], np.float64)
        ledger.at_start(forward[[first]], store)
        ledger.at_start(backward[[last]], gradients)
        ledger.at_end(backward[[first]], -store - gradients)
    return ledger.curve(states)


def _messages(ledger: _Ledger, stage: int, places: Sequence[Positions], times: Times, buffers: Integers) -> None:
    """Buffers of posted receives, of the gradient that a running backward reads, and of outputs whose transfer has not ended."""
    sizes = buffers.astype(np.float64)
    forward, backward = places[stage].forward_at, places[stage].backward_at
    for position, has_source, has_target, target in (
        (forward, stage > 0, stage < len(places) - 1, stage + 1),
        (backward, stage < len(places) - 1, stage > 0, stage - 1),
    ):
        if has_source:
            uses = np.sort(position)
            posted_before = np.concatenate(([max(uses[0] - 1, 0)], uses[:-1]))[np.searchsorted(uses, position)]
            ledger.before(posted_before, times.posted[stage][position], sizes)
            (ledger.at_start if position is forward else ledger.at_end)(position, -sizes)
        if has_target:
            received = places[target].forward_at if position is forward else places[target].backward_at
            ledger.after(position, times.end[stage][position], sizes)
            ledger.after(position, times.arrival[target][received], -sizes)
