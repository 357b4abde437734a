"""Stage-aware chunk-level recompute (Eq. 15-20, Algorithm 2) as a covering problem over exact memory constraints.

Every action of every stage puts a constraint on the chunks that are live then: recomputing a layer of a live chunk frees bytes, and
the action demands that enough are freed. Chunks on a diagonal (chunk ``k`` in backward order at stage ``p`` and ``k + 1`` at
stage ``p + 1``) may share a variable, since one stage's recompute makes the others wait as long.

Two constraints belong to an action, because a chunk of which all layers are recomputed needs one layer's activations while its
backward runs: one with the chunk counted as if a layer were kept, one without the chunk's own share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infinipipe.cost import CostTable
from infinipipe.cost.features import FloatArray
from infinipipe.planner.memory import IntArray, StageMemory

TOLERANCE = 0.5
"""Bytes by which a constraint may be missed in floating point; problems are stated for one byte less than the budget."""


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

    def merged(self) -> Rows:
        """The same with every column at most once in a row, in ascending order, its values added up."""
        rows = np.repeat(np.arange(self.num_rows), np.diff(self.indptr))
        width = int(self.columns.max(initial=0)) + 1
        places, which = np.unique(rows * width + self.columns, return_inverse=True)
        lengths = np.bincount(places // width, minlength=self.num_rows)
        values: FloatArray = np.bincount(which, self.values, len(places)).astype(np.float64)
        return Rows(
            indptr=np.concatenate(([0], np.cumsum(lengths))),
            columns=places % width,
            values=values,
            demand=self.demand,
        )

    def product(self, x: FloatArray | IntArray) -> FloatArray:
        """``A x``, of shape (rows,)."""
        sums = np.concatenate(([0.0], np.cumsum(self.values * x[self.columns])))
        return sums[self.indptr[1:]] - sums[self.indptr[:-1]]


@dataclass(frozen=True)
class RecomputeProblem:
    """Which layers to recompute so that every constraint holds.

    Attributes:
        variable: (parts, chunks) the variable of each.
        upper: largest value of a variable: layers of the largest part. A part of fewer layers recomputes the same
            fraction of them, rounded up.
        weight: (variables,) cost of one unit.
        rows: the constraints, in units of a variable.
        stage_layers: layers of every part.
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
        """(parts, chunks) recomputed layers."""
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

    The objective is the sum of the variables (Eq. 16). Without ``share_diagonals`` every chunk of every part has its own.
    """
    parts, chunks = table.num_parts, table.num_chunks
    if share_diagonals:
        backward_at = memories[table.placement.stage_of[0]].last[:chunks]
        rank = np.argsort(np.argsort(backward_at))
        variable = rank[None, :] + (parts - 1 - np.arange(parts))[:, None]
    else:
        variable = np.arange(parts * chunks).reshape(parts, chunks)
    upper = max(table.stage_layers)
    count = int(variable.max()) + 1
    rows = [
        _constraints(memory, memory.of(variable), memory.saving * (memory.layers / max(upper, 1)), budget)
        for memory in memories
    ]
    lengths = np.concatenate([part[0] for part in rows])
    constraints = Rows(
        indptr=np.concatenate(([0], np.cumsum(lengths))),
        columns=np.concatenate([part[1] for part in rows]),
        values=np.concatenate([part[2] for part in rows]),
        demand=np.concatenate([part[3] for part in rows]),
    )
    if share_diagonals and parts > table.placement.num_stages:
        # A diagonal passes through several parts of a stage, whose holdings may be live at once.
        constraints = constraints.merged()
    return RecomputeProblem(variable, upper, np.ones(count), constraints, table.stage_layers)


def _constraints(
    memory: StageMemory, variable: IntArray, saving: FloatArray, budget: float
) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
    """Row lengths, columns, values and demands of one stage's constraints that demand anything and are not implied by others."""
    kept = np.flatnonzero((memory.kept > budget) & ~_implied(memory))
    full = np.flatnonzero(memory.full > budget)
    if not len(kept) and not len(full):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    order = np.argsort(memory.first)
    actions = np.concatenate((kept, full))
    begun = np.searchsorted(memory.first[order], actions, side="right")
    lengths, columns = np.zeros(len(actions), np.int64), []
    for row, (action, reached) in enumerate(zip(actions.tolist(), begun.tolist(), strict=True)):
        live = order[:reached]
        live = live[memory.last[live] >= action]
        if row >= len(kept):
            live = live[live != memory.own[action]]
        lengths[row] = len(live)
        columns.append(live)
    held = np.concatenate(columns)
    demand = np.concatenate((memory.kept[kept], memory.full[full])) - (budget - 1)
    return lengths, variable[held], saving[held], demand


def _implied(memory: StageMemory) -> NDArray[np.bool_]:
    """Actions whose constraint holds whenever a neighbouring action's does, so that it need not be stated.

    Let ``live(i)`` be what can be freed at action ``i``; its constraint demands that ``freed(live(i)) >= kept[i] - budget``. From one
    action to the next, ``live`` gains what the next acquires and loses what this one releases::

        action        i: releases r          i + 1: acquires a
        live          L + r                  L + a               (each of r and a may be missing)

    If ``i + 1`` holds then ``freed(L) >= kept[i+1] - budget - most(a)``, so ``i`` holds too where that is at least ``kept[i] -
    budget``: the first rule. If ``i`` holds then ``freed(L) >= kept[i] - budget - most(r)``: the second. With neither ``r`` nor
    ``a`` both free the same, and the one that demands less goes; at equal demands just the second does, or each would be
    left out for the other's sake. With ``a`` and ``r`` a pair can imply each other only if nothing can be freed by either, in which
    case no plan fits, and :meth:`StageMemory.least` has said so before.
    """
    kept, most = memory.kept, memory.saving * memory.layers
    acquires, releases = np.zeros((2, len(kept)), np.bool_)
    acquires[memory.first], releases[memory.last] = True, True
    own = most[memory.own]
    implied = np.zeros(len(kept), np.bool_)
    implied[:-1] |= acquires[1:] & (kept[1:] - own[1:] >= kept[:-1])
    implied[1:] |= releases[:-1] & (kept[1:] <= kept[:-1] - own[:-1])
    same = ~releases[:-1] & ~acquires[1:]
    implied[:-1] |= same & (kept[:-1] < kept[1:])
    implied[1:] |= same & (kept[1:] <= kept[:-1])
    return implied


def aggregated_bound(problem: RecomputeProblem) -> float:
    """A quick lower bound of the objective: the fractional knapsack that is left if only the sum of all constraints must hold."""
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
