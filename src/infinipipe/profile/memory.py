"""Sets the formula of activation bytes against measured ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from infinipipe.cost import AnalyticCost, MemoryUse
from infinipipe.cost.features import chunk_features
from infinipipe.plan import Action, Chunk, Plan, ReplicaPlan
from infinipipe.plan.kinds import ACTIVATIONS, WEIGHT_OPERANDS
from infinipipe.profile.timing import Run, stage_processes
from infinipipe.runtime import Event

TOLERANCE = 0.02
"""Measured bytes within this of the formula leave it as it is: the rest is buffers of messages on their way."""
BACKWARD_FIELDS = ("backward", "backward_input")


@dataclass(frozen=True)
class MemoryRatios:
    """Measured over formula, medians; NaN where nothing was measured.

    Attributes:
        kept: activations of a kept layer.
        input: what a recomputed layer holds.
        forward: what a forward needs while it runs.
        backward: what a backward, or its first half, needs while it runs.
        operands: what is held between the halves of a backward.
    """

    kept: float
    input: float
    forward: float
    backward: float
    operands: float = math.nan

    def corrected(self, use: MemoryUse) -> MemoryUse:
        """The formula scaled where measured bytes differ from it."""

        def scale(ratio: float) -> float:
            return (
                ratio if abs(ratio - 1) > TOLERANCE else 1.0
            )  # NaN, where nothing was measured, is no such difference

        backward = {name: getattr(use, name).scaled(scale(self.backward)) for name in BACKWARD_FIELDS}
        return dataclasses.replace(
            use,
            layer=(use.layer + use.layer_kv) * scale(self.kept) - use.layer_kv,
            layer_input=use.layer_input * scale(self.input),
            forward_kept=use.forward_kept * scale(self.forward),
            weight_operands=use.weight_operands * scale(self.operands),
            **backward,
        )


def memory_ratios(runs: Sequence[tuple[Plan, Run]], cost: AnalyticCost) -> MemoryRatios:
    """Compare what plans held, action by action, with ``cost``, whose stages are those measured, each of one part.

    What actions need while they run is compared on all stages but the last, where head and loss come on top, unless it is
    the only one; and not where the gradient of the embedding, which is known, is the most.
    """
    ratios = {name: _Ratios() for name in MemoryRatios.__dataclass_fields__}
    for plan, run in runs:
        for stage in range(cost.num_stages):
            events = run.events[stage_processes(stage, cost.num_stages, run)[0]]
            for account, event in zip(_accounts(plan.replicas[0], stage, cost), events, strict=True):
                account.compare(event, cost, ratios)
    return MemoryRatios(**{name: found.typical() for name, found in ratios.items()})


@dataclass(frozen=True)
class _Account:
    """What an action should change, by the formula.

    Attributes:
        action, chunk, stage, recomputed: what it is.
        acquired, released: bytes of every resource that it acquires and releases, by name.
        taken, given: of the messages that it takes from, and makes for, another stage.
    """

    action: Action
    chunk: Chunk
    stage: int
    recomputed: int
    acquired: dict[str, float]
    released: dict[str, float]
    taken: int
    given: int

    def compare(self, event: Event, cost: AnalyticCost, ratios: Mapping[str, _Ratios]) -> None:
        """Set what was measured of the action against it."""
        row, layers, last = self.action.kind.row, cost.stage_layers[self.stage], cost.num_stages - 1
        change = event.after - event.before + self.taken - self.given + sum(self.released.values())
        features, tokens = chunk_features(self.chunk), self.chunk.num_tokens

        def measured(name: str) -> float:
            """Bytes of one resource that it acquired: all that changed but for the others."""
            return change - sum(size for other, size in self.acquired.items() if other != name)

        if (held := self.acquired.get(ACTIVATIONS.name)) is not None and layers:
            name, part = "kept", float(layers * cost.layer_activation(features))
            if self.recomputed:
                name, part = "input", layers * cost.memory.layer_input * tokens / cost.sequence_parallel
            if self.recomputed in (0, layers):
                ratios[name].add(self.chunk, measured(ACTIVATIONS.name) - held + part, part)
        if (operands := self.acquired.get(WEIGHT_OPERANDS.name)) is not None:
            ratios["operands"].add(self.chunk, measured(WEIGHT_OPERANDS.name), operands)
        if self.stage == last > 0:
            return
        expected = cost.transient_bytes(row.cost, self.chunk, self.stage, self.recomputed)
        at_start = sum(size for name, size in self.acquired.items() if name != WEIGHT_OPERANDS.name)
        needed = event.peak - event.before - at_start + (self.taken if row.keeps_input else 0)
        if row.keeps_input:
            if self.stage < last and self.recomputed < layers:
                ratios["forward"].add(self.chunk, needed, expected)
        elif row.recomputes:
            alone = dataclasses.replace(cost, memory=dataclasses.replace(cost.memory, embedding_gradient=0.0))
            if expected == alone.transient_bytes(row.cost, self.chunk, self.stage, self.recomputed):
                ratios["backward"].add(self.chunk, needed, expected)


def _accounts(replica: ReplicaPlan, stage: int, cost: AnalyticCost) -> list[_Account]:
    """What every action of a stage should change, in their order."""
    program, table = replica.program, cost.table(replica.chunks)
    held = table.held_at(replica.recompute)
    first, last = program.base[stage], program.base[stage + 1]
    acquired: list[dict[str, float]] = [{} for _ in range(first, last)]
    released: list[dict[str, float]] = [{} for _ in range(first, last)]
    for intervals in program.intervals:
        name = intervals.resource.name
        sizes = held[name][intervals.part, intervals.chunk].tolist()
        for begin, end, size in zip(intervals.first.tolist(), intervals.last.tolist(), sizes, strict=True):
            if first <= begin < last:
                acquired[begin - first][name] = size
                released[end - first][name] = size
    accounts = []
    for number, action in enumerate(replica.actions[stage], first):
        chunk = replica.chunks[action.chunk]
        size = cost.message_bytes(chunk.num_tokens)
        accounts.append(
            _Account(
                action,
                chunk,
                stage,
                replica.recompute[stage][action.chunk],
                acquired[number - first],
                released[number - first],
                taken=size if program.takes[number] >= 0 else 0,
                given=size if program.gives[number] >= 0 else 0,
            )
        )
    return accounts


class _Ratios:
    """Measured over expected bytes of chunks."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, float]] = []

    def add(self, chunk: Chunk, measured: float, expected: float) -> None:
        if expected > 0:
            self._rows.append((chunk.num_tokens, measured / expected))

    def typical(self) -> float:
        """The median over the larger half of the chunks, in which what is independent of tokens hardly counts; NaN if empty."""
        if not self._rows:
            return math.nan
        tokens, ratios = np.array(self._rows).T
        return float(np.median(ratios[tokens >= np.median(tokens)]))
