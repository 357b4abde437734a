"""Stage-aware chunk-level recompute (Eq. 15-20, Algorithm 2) as a covering problem over exact memory windows.

Every action of every stage is a window: the chunks that are live then. Recomputing a layer of a live chunk frees bytes; each
window demands that enough are freed. Chunks on a diagonal (chunk ``k`` in backward order at stage ``p`` and ``k + 1`` at
stage ``p + 1``) may share a variable, since one stage's recompute makes the others wait as long.

Two windows belong to an action, because a chunk of which all layers are recomputed needs one layer's activations while its
backward runs: one with the chunk counted as if a layer were kept, one without the chunk's own share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infinipipe.cost import CostTable
from infinipipe.cost.work import FloatArray
from infinipipe.planner.memory import IntArray, StageMemory

TOLERANCE = 0.5
"""Bytes by which a window may be missed in floating point; problems are stated for one byte less than the budget."""


@dataclass(frozen=True)
class Rows:
    """A sparse matrix by rows: row ``i`` has ``values[indptr[i]:indptr[i + 1]]`` in ``columns[...]``; ``A x >= demand``."""

    indptr: IntArray
    columns: IntArray
    values: FloatArray
    demand: FloatArray

    @property
    def num_rows(self) -> int:
        return len(self.demand)

    def product(self, x: FloatArray | IntArray) -> FloatArray:
        """``A x``, of shape (rows,)."""
        sums = np.concatenate(([0.0], np.cumsum(self.values * x[self.columns])))
        return sums[self.indptr[1:]] - sums[self.indptr[:-1]]


@dataclass(frozen=True)
class RecomputeProblem:
    """Which layers to recompute so that every window fits.

    Attributes:
        variable: (stages, chunks) the variable of each.
        upper: largest value of a variable: layers of the largest stage. A stage of fewer layers recomputes the same
            fraction of them, rounded up.
        weight: (variables,) cost of one unit.
        rows: the windows, in units of a variable.
        stage_layers: layers of every stage.
    """

    variable: IntArray
    upper: int
    weight: FloatArray
    rows: Rows
    stage_layers: tuple[int, ...]

    @property
    def num_variables(self) -> int:
        return len(self.weight)

    def objective(self, values: FloatArray | IntArray) -> float:
        return float(self.weight @ values)

    def layers(self, values: IntArray) -> IntArray:
        """(stages, chunks) recomputed layers."""
        per_stage = np.array(self.stage_layers, np.int64)[:, None]
        shared = values[self.variable]
        return -(-shared * per_stage // self.upper) if self.upper else np.zeros_like(shared)


def recompute_problem(
    memories: Sequence[StageMemory],
    table: CostTable,
    budget: float,
    *,
    share_diagonals: bool = True,
) -> RecomputeProblem:
    """State the problem of fitting a replica's stages into ``budget`` bytes.

    The objective is the sum of the variables (Eq. 16). Without ``share_diagonals`` every chunk of every stage has its own.
    """
    stages, chunks = table.num_stages, table.num_chunks
    rank = np.argsort(np.argsort(memories[0].positions.backward_at))
    if share_diagonals:
        variable = rank[None, :] + (stages - 1 - np.arange(stages))[:, None]
    else:
        variable = np.arange(stages * chunks).reshape(stages, chunks)
    upper = max(table.stage_layers)
    fraction = np.array(table.stage_layers, np.float64)[:, None] / max(upper, 1)
    count = int(variable.max()) + 1
    parts = [
        _windows(memory, variable[stage], memory.saving * fraction[stage], budget)
        for stage, memory in enumerate(memories)
    ]
    lengths = np.concatenate([part[0] for part in parts])
    rows = Rows(
        indptr=np.concatenate(([0], np.cumsum(lengths))),
        columns=np.concatenate([part[1] for part in parts]),
        values=np.concatenate([part[2] for part in parts]),
        demand=np.concatenate([part[3] for part in parts]),
    )
    return RecomputeProblem(variable, upper, np.ones(count), rows, table.stage_layers)


def _windows(
    memory: StageMemory, variable: IntArray, saving: FloatArray, budget: float
) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
    """Row lengths, columns, values and demands of one stage's windows that demand anything and are not implied by others."""
    positions = memory.positions
    kept = np.flatnonzero((memory.kept > budget) & ~_implied(memory))
    full = np.flatnonzero(memory.full > budget)
    if not len(kept) and not len(full):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    order = np.argsort(positions.forward_at)
    actions = np.concatenate((kept, full))
    forwarded = np.searchsorted(positions.forward_at[order], actions, side="right")
    lengths, columns = np.zeros(len(actions), np.int64), []
    for row, (action, reached) in enumerate(zip(actions.tolist(), forwarded.tolist(), strict=True)):
        live = order[:reached]
        live = live[positions.backward_at[live] >= action]
        if row >= len(kept):
            live = live[live != positions.chunk[action]]
        lengths[row] = len(live)
        columns.append(live)
    chunks = np.concatenate(columns)
    demand = np.concatenate((memory.kept[kept], memory.full[full])) - (budget - 1)
    return lengths, variable[chunks], saving[chunks], demand


def _implied(memory: StageMemory) -> NDArray[np.bool_]:
    """Actions whose window holds whenever a neighbouring action's does."""
    positions, kept = memory.positions, memory.kept
    forward = positions.is_forward
    most_freed = memory.saving[positions.chunk] * memory.layers
    implied = np.zeros(len(kept), np.bool_)
    implied[:-1] |= forward[1:] & (kept[1:] - most_freed[1:] >= kept[:-1])
    implied[1:] |= ~forward[:-1] & (kept[1:] <= kept[:-1] - most_freed[:-1])
    turn = forward[:-1] & ~forward[1:]
    implied[:-1] |= turn & (kept[:-1] < kept[1:])
    implied[1:] |= turn & (kept[1:] <= kept[:-1])
    return implied


def aggregated_bound(problem: RecomputeProblem) -> float:
    """A quick lower bound of the objective: the fractional knapsack that is left if only the sum of all windows must hold."""
    rows = problem.rows
    if not rows.num_rows:
        return 0.0
    gain = np.bincount(rows.columns, rows.values, problem.num_variables)
    useful = gain > 0
    gain, weight = gain[useful], problem.weight[useful]
    order = np.argsort(weight / gain)
    reached = np.cumsum(gain[order]) * problem.upper
    paid = np.cumsum(weight[order]) * problem.upper
    return float(np.interp(rows.demand.sum(), np.append(0.0, reached), np.append(0.0, paid)))


@dataclass(frozen=True)
class RecomputeSolution:
    """Values of the variables, with a lower bound of every solution's objective."""

    values: IntArray
    objective: float
    bound: float

    @property
    def gap(self) -> float:
        """How far the objective may be above the optimum, relative to the bound; 0 if nothing is recomputed."""
        return self.objective / self.bound - 1.0 if self.bound > 0 else 0.0
