"""A plan of one replica in the making: chunks in order with their costs, action lists, memory and makespan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from infinipipe.cost import CostModel, CostTable
from infinipipe.plan import Chunk, Pipeline, ReplicaPlan, Slice, build_replica
from infinipipe.planner.chunking import SliceTime
from infinipipe.planner.memory import BudgetError, IntArray, StageMemory, stage_memories
from infinipipe.planner.recompute import RecomputeProblem, RecomputeSolution, recompute_problem
from infinipipe.planner.settings import Recompute
from infinipipe.planner.solvers import solve
from infinipipe.simulate.engine import Engine

ADVICE = "allow more slices, use more stages or a lower token capacity"


def fit_slice_time(cost: CostModel, longest: int) -> SliceTime:
    """Seconds of a slice over all stages, forward and backward, without what a chunk costs whatever its size.

    Read off three whole chunks, or two where the cost model tells what windows its layers have; it is exact for costs of the
    form of Eq. 1.
    """

    def seconds(length: int) -> float:
        chunk = Chunk((Slice(0, 0, length, length),))
        parts = range(len(cost.stage_layers))
        return sum(
            cost.pass_seconds("forward", chunk, part) + cost.pass_seconds("backward", chunk, part) for part in parts
        )

    n = max(longest, 1024)
    one, two, three = seconds(1), seconds(n), seconds(2 * n)
    first, second = (two - one) / (n - 1), (three - two) / n
    pairs = dict(cost.pair_seconds)
    full = pairs.pop(0, 0.0)
    if pairs:
        by_attention = SliceTime(full, 0.0, tuple(sorted(pairs.items())))
        token = second - by_attention(n, 2 * n) / n
        return dataclasses.replace(by_attention, token=max(token, 1e-30))
    pair = max((second - first) / (2 * n - 1), 0.0)
    return SliceTime(pair, max(first - pair * (n + 1), 1e-30))


@dataclass(frozen=True)
class Draft:
    """One replica's chunks, their order and their schedule."""

    pipelines: tuple[tuple[Chunk, ...], ...]
    cost: CostModel
    schedule: str = "1f1b"
    warmup: tuple[int, ...] | None = None

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(chunk for pipeline in self.pipelines for chunk in pipeline)

    @cached_property
    def table(self) -> CostTable:
        return self.cost.table(self.chunks)

    @cached_property
    def replica(self) -> ReplicaPlan:
        """The replica without recompute."""
        return build_replica(
            [Pipeline(chunks) for chunks in self.pipelines if chunks],
            self.cost.placement,
            schedule=self.schedule,
            warmup=self.warmup,
        )

    @cached_property
    def engine(self) -> Engine:
        return Engine(self.replica)

    @cached_property
    def memories(self) -> list[StageMemory]:
        return stage_memories(self.replica.program, self.table, self.cost)

    @cached_property
    def seconds_without_recompute(self) -> float:
        """Seconds that the step would take if nothing were recomputed."""
        return self.engine.makespan(self.table.seconds, self.table.message)

    def makespan(self, recompute: IntArray) -> float:
        """Seconds that the step takes with ``recompute``, (parts, chunks) layers."""
        if not recompute.any():
            return self.seconds_without_recompute
        return self.engine.makespan(self.table.seconds, self.table.message, self.table.recompute_seconds(recompute))

    def least(self) -> tuple[int, int]:
        """The least bytes that this order needs with everything recomputed, and the stage that needs them."""
        peaks = [max(memory.least(), self.cost.state_bytes(memory.stage)) for memory in self.memories]
        worst = int(np.argmax(peaks))
        return int(np.ceil(peaks[worst])) + 1, worst

    def problem(self, budget: float, *, share_diagonals: bool = True) -> RecomputeProblem:
        """The recompute problem of fitting this order into ``budget`` bytes."""
        return recompute_problem(self.memories, self.table, budget, share_diagonals=share_diagonals)

    def uniform(self, layers: int) -> IntArray:
        """(parts, chunks): ``layers`` of every chunk at every part, or all where the part has fewer."""
        per_part = np.minimum(np.array(self.table.stage_layers, np.int64), layers)
        return np.repeat(per_part[:, None], len(self.chunks), axis=1)

    def peaks(self, recompute: IntArray) -> list[float]:
        """Peak bytes of every stage with ``recompute``."""
        return [
            max(float(memory.curve(memory.of(recompute)).max(initial=0.0)), self.cost.state_bytes(memory.stage))
            for memory in self.memories
        ]

    def fit(
        self, budget: int | None, mode: Recompute, *, share_diagonals: bool = True
    ) -> tuple[IntArray, RecomputeSolution | None]:
        """Recomputed layers that keep every stage within ``budget``. Raises ``BudgetError`` if ``mode`` cannot."""
        if mode != "auto":
            layers = {"none": 0, "all": max(self.table.stage_layers)}.get(mode, mode) if isinstance(mode, str) else mode
            recompute = self.uniform(int(layers))
            if budget is not None:
                self._check(recompute, budget, "recompute more layers, or set recompute to auto")
            return recompute, None
        if budget is None:
            return self.uniform(0), None
        required, stage = self.least()
        if required > budget:
            raise BudgetError(required, budget, stage, ADVICE)
        problem = self.problem(budget, share_diagonals=share_diagonals)
        solution = solve(problem)
        recompute = problem.layers(solution.values)
        self._check(recompute, budget, ADVICE)
        return recompute, solution

    def _check(self, recompute: IntArray, budget: int, advice: str) -> None:
        peaks = self.peaks(recompute)
        worst = int(np.argmax(peaks))
        if peaks[worst] > budget:
            raise BudgetError(int(np.ceil(peaks[worst])), budget, worst, advice)

    def build(self, recompute: IntArray) -> ReplicaPlan:
        """The replica with ``recompute``."""
        rows = tuple(tuple(row) for row in recompute.tolist())
        return ReplicaPlan(self.replica.pipelines, self.replica.actions, rows, self.replica.placement)
