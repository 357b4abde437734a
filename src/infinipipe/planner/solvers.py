"""Solvers of the recompute problem: linear relaxation with rounding and repair, and the integer program as reference."""

from __future__ import annotations

import dataclasses
import math

import highspy
import numpy as np

from infinipipe.cost.features import FloatArray
from infinipipe.planner.memory import IntArray
from infinipipe.planner.recompute import TOLERANCE, RecomputeProblem, RecomputeSolution, Rows

LARGE = 60_000
"""Entries of a problem from which an interior-point method beats the simplex method."""

GOOD_GAP = 0.01
"""Gap below which no further rounding is tried."""
POOR_GAP = 0.02
"""Gap above which the integer program is tried on the final plan."""
TREE_NODES = 60
"""Nodes of its search tree."""
PROGRAM_SECONDS = 60.0
"""Seconds after which it ends in any case."""
UPWARD = (0.0, 0.15, 0.3, 0.45)
"""What roundings add before rounding down."""


class SolverError(RuntimeError):
    """The linear or integer program could not be solved."""


class _QuietHighs(highspy.Highs):
    """A solver without callbacks: enabling them prints a banner that no option turns off."""

    def enableCallbacks(self) -> None:  # noqa: N802
        pass


def _model(problem: RecomputeProblem, *, integer: bool) -> highspy.Highs:
    rows, count = problem.rows, problem.num_variables
    scale = rows.values.max()
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = count, rows.num_rows
    lp.col_cost_ = problem.weight / problem.weight.mean()
    lp.col_lower_, lp.col_upper_ = np.zeros(count), np.full(count, float(problem.upper))
    lp.row_lower_ = rows.demand / scale
    lp.row_upper_ = np.full(rows.num_rows, highspy.kHighsInf)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = rows.indptr.astype(np.int32)
    lp.a_matrix_.index_ = rows.columns.astype(np.int32)
    lp.a_matrix_.value_ = rows.values / scale
    if integer:
        lp.integrality_ = [highspy.HighsVarType.kInteger] * count
    highs = _QuietHighs()
    highs.silent()
    highs.setOptionValue("threads", 1)
    highs.passModel(lp)
    return highs


def solve_relaxation(problem: RecomputeProblem) -> tuple[float, FloatArray]:
    """A certified lower bound of integer solutions, and a solution of the linear relaxation.

    Raises ``SolverError`` if even recomputing everything leaves a constraint unmet.
    """
    if not problem.rows.num_rows:
        return 0.0, np.zeros(problem.num_variables)
    large = len(problem.rows.values) > LARGE
    relaxed = problem if large else with_whole_units(problem)
    highs = _model(relaxed, integer=False)
    if large:
        highs.setOptionValue("solver", "ipm")
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise SolverError(f"the linear relaxation is {highs.modelStatusToString(highs.getModelStatus())}")
    solution = highs.getSolution()
    prices = np.array(solution.row_dual) * float(relaxed.weight.mean()) / float(relaxed.rows.values.max())
    return certified_bound(relaxed, prices), np.clip(np.array(solution.col_value), 0.0, problem.upper)


def with_whole_units(problem: RecomputeProblem) -> RecomputeProblem:
    """The problem with a second row for every constraint: how many whole units it takes at least, whichever they are.

    No unit frees more than the constraint's largest, so ``ceil(demand / largest)`` units are needed: a Chvatal-Gomory cut.
    """
    rows = problem.rows
    largest = np.maximum.reduceat(rows.values, rows.indptr[:-1])
    units = np.ceil((rows.demand - TOLERANCE) / largest - 1e-9)
    both = Rows(
        indptr=np.concatenate((rows.indptr, rows.indptr[1:] + rows.indptr[-1])),
        columns=np.tile(rows.columns, 2),
        values=np.concatenate((rows.values, np.repeat(largest, np.diff(rows.indptr)))),
        demand=np.concatenate((rows.demand, units * largest)),
    )
    return dataclasses.replace(problem, rows=both)


def certified_bound(problem: RecomputeProblem, prices: FloatArray) -> float:
    """What weak duality proves from a price per byte that every constraint demands, whoever found the prices.

    Any ``prices >= 0`` of shape (rows,) give a bound of every solution's objective; it is rounded up to a whole number if
    all weights are 1, since then every objective is one.
    """
    rows, prices = problem.rows, np.maximum(prices, 0.0)
    paid = np.bincount(rows.columns, rows.values * np.repeat(prices, np.diff(rows.indptr)), problem.num_variables)
    bound = float(prices @ rows.demand - problem.upper * np.maximum(paid - problem.weight, 0.0).sum())
    if (problem.weight == 1.0).all():
        bound = float(np.ceil(bound - 1e-6 * max(1.0, bound)))
    return max(bound, 0.0)


def solve_exactly(
    problem: RecomputeProblem, *, gap: float = 0.0, time_limit: float = PROGRAM_SECONDS, nodes: int | None = None
) -> RecomputeSolution:
    """The integer program, to a relative ``gap``, within ``time_limit`` seconds and ``nodes`` of the search tree.

    Raises ``SolverError`` if nothing is found.
    """
    if not problem.rows.num_rows:
        return RecomputeSolution(np.zeros(problem.num_variables, np.int64), 0.0, 0.0)
    highs = _model(problem, integer=True)
    highs.setOptionValue("mip_rel_gap", gap)
    highs.setOptionValue("time_limit", time_limit)
    if nodes is not None:
        highs.setOptionValue("mip_max_nodes", nodes)
    highs.run()
    info = highs.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        raise SolverError(f"the integer program is {highs.modelStatusToString(highs.getModelStatus())}")
    values = np.rint(np.array(highs.getSolution().col_value)).astype(np.int64)
    values = repair(problem, values)
    bound = info.mip_dual_bound * float(problem.weight.mean())
    return RecomputeSolution(values, problem.objective(values), bound)


def solve(problem: RecomputeProblem, *, roundings: int = 12) -> RecomputeSolution:
    """Round the linear relaxation, repair it greedily, drop what is not needed; the best of several roundings.

    The first rounds down; while the gap is above ``GOOD_GAP`` others round up more, then at random from a fixed seed. Raises
    ``SolverError``.
    """
    bound, relaxed = solve_relaxation(problem)
    random = np.random.default_rng(0)
    best: RecomputeSolution | None = None
    # Rounded down, little is recomputed in vain, and the fractions that are lost say what to raise. That may still raise the wrong
    # chunks, of which many do equally well: rounding up more settles some of them beforehand, and noise chooses differently.
    for number in range(roundings):
        upward = UPWARD[number % len(UPWARD)] + 1e-6
        noise = random.random(len(relaxed)) if number >= len(UPWARD) else np.ones(len(relaxed))
        start = np.minimum(np.floor(relaxed + upward * noise), problem.upper).astype(np.int64)
        values = repair(problem, start, np.maximum(relaxed - start, 0.0) * noise)
        solution = RecomputeSolution(values, problem.objective(values), bound)
        if best is None or solution.objective < best.objective:
            best = solution
        if best.gap <= GOOD_GAP:
            break
    assert best is not None
    return best


def close_gap(
    problem: RecomputeProblem, solution: RecomputeSolution, *, seconds: float = math.inf
) -> RecomputeSolution:
    """Run the integer program for a while, at most ``seconds``, on a solution whose gap is above ``POOR_GAP``; the better of both, and their bounds.

    Where few layers are recomputed, one layer is a large gap, and the relaxation cannot tell that it is needed; the program can.
    """
    if solution.gap <= POOR_GAP or len(problem.rows.values) > LARGE:
        return solution
    try:
        exact = solve_exactly(problem, gap=GOOD_GAP, time_limit=min(seconds, PROGRAM_SECONDS), nodes=TREE_NODES)
    except SolverError:
        return solution
    bound = max(solution.bound, exact.bound)
    if (problem.weight == 1.0).all():
        bound = float(np.ceil(bound - 1e-6 * max(1.0, bound)))
    best = min((solution, exact), key=lambda found: found.objective)
    return RecomputeSolution(best.values, best.objective, bound)


def repair(problem: RecomputeProblem, values: IntArray, preference: FloatArray | None = None) -> IntArray:
    """Make ``values`` meet every constraint: raise variables until they do, then lower those that none needs.

    ``preference``, (variables,), is by how much raising a variable is to count for more than what it frees, such as the fraction
    that rounding has taken from it. Raises ``SolverError``.
    """
    state = _Repair(problem, values, preference)
    state.raise_until_met()
    state.lower_unneeded()
    return state.values


class _Repair:
    """Values of the variables, with what each constraint still misses.

    The constraint that misses most is met first, by the chunk in it of which one more layer frees the most of what all miss. A layer
    serves every constraint at which its chunk is live, so that raising for one overshoots at others; lowering takes that back::

        missing  -3   5   0   2      after rounding
                 -3   1  -4  -2      a layer more of a chunk of 4 bytes a layer, live at the last three
                 -6  -2  -4  -2      one of a chunk of 3, live at the first two: all are met
                 -4   0  -4  -2      a layer less of a chunk of 2, live at the first two, that none needs now
    """

    def __init__(self, problem: RecomputeProblem, values: IntArray, preference: FloatArray | None) -> None:
        rows = problem.rows
        self.problem, self.values = problem, values.copy()
        self.preference = preference if preference is not None else np.zeros(problem.num_variables)
        by_column = np.argsort(rows.columns, kind="stable")
        self.row_of = np.repeat(np.arange(rows.num_rows), np.diff(rows.indptr))[by_column]
        self.amount = rows.values[by_column]
        counts = np.bincount(rows.columns, minlength=problem.num_variables)
        self.start = np.concatenate(([0], np.cumsum(counts))).tolist()
        self.missing = rows.demand - rows.product(self.values)

    def _column(self, variable: int) -> slice:
        return slice(self.start[variable], self.start[variable + 1])

    def _change(self, variable: int, step: int) -> None:
        column = self._column(variable)
        self.values[variable] += step
        self.missing[self.row_of[column]] -= step * self.amount[column]

    def _gain(self, variable: int) -> float:
        """Demand that one more unit meets, per weight."""
        column = self._column(variable)
        missing = np.maximum(self.missing[self.row_of[column]], 0.0)
        gain = np.minimum(missing, self.amount[column]).sum()
        return float(gain * (1.0 + self.preference[variable]) / self.problem.weight[variable])

    def raise_until_met(self) -> None:
        rows, upper = self.problem.rows, self.problem.upper
        while rows.num_rows:
            worst = int(np.argmax(self.missing))
            if self.missing[worst] <= TOLERANCE:
                return
            columns = rows.columns[rows.indptr[worst] : rows.indptr[worst + 1]]
            choices = [v for v in columns.tolist() if self.values[v] < upper]
            if not choices:
                raise SolverError("a constraint is unmet even if everything in it is recomputed")
            self._change(max(choices, key=self._gain), 1)

    def lower_unneeded(self) -> None:
        order = np.argsort(-self.problem.weight, kind="stable")
        for variable in order.tolist():
            column = self._column(variable)
            while self.values[variable] > 0:
                after = self.missing[self.row_of[column]] + self.amount[column]
                if (after > TOLERANCE).any():
                    break
                self._change(variable, -1)
