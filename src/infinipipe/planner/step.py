"""From the lengths of a global batch to its plan."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from infinipipe.cost import CostModel
from infinipipe.plan import Plan, PlanError, ReplicaPlan, build_replica
from infinipipe.planner.draft import fit_slice_time
from infinipipe.planner.memory import BudgetError, check
from infinipipe.planner.predict import predict_shares
from infinipipe.planner.registry import get_planner
from infinipipe.planner.replicas import split_by_time
from infinipipe.planner.search import Found, Limits, ReplicaSearch
from infinipipe.planner.settings import PlannerSettings

MOST_TOKENS = 2**40
"""The longest sequence for which costs, which grow with its square, are still computed exactly enough."""


def plan_replica(
    lengths: Sequence[int],
    sequences: Sequence[int],
    cost: CostModel,
    settings: PlannerSettings,
    *,
    end: float | None = None,
) -> Found:
    """Plan ``sequences`` of a batch for one replica with the planner that ``settings`` name. Raises as :func:`plan_step`.

    The search ends at ``end``, by ``time.monotonic``, if given, instead of after the settings' time limit.
    """
    if end is None:
        end = time.monotonic() + (math.inf if settings.time_limit is None else settings.time_limit)
    search = ReplicaSearch(lengths, sequences, cost, settings, Limits(end, settings.work_limit))
    found = get_planner(settings.planner)(search)
    if not isinstance(found, Found):
        raise PlanError(
            f"the planner {settings.planner} returns a {type(found).__name__}; it must return what it has found, such as "
            "search.refine_best()"
        )
    return found


def plan_step(
    lengths: Sequence[int], cost: CostModel, settings: PlannerSettings | None = None, *, processes: int = 1
) -> Plan:
    """Plan one optimizer step over sequences of ``lengths`` tokens.

    The plan is valid and within the memory budget. Its metadata holds the planner's name, and for every replica its predicted
    seconds, the gap of its recompute to the solver's bound and, with a budget, the peak bytes of its stages; and of the whole step the
    shares of time that :func:`infinipipe.planner.predict.predict_shares` predicts. Replicas are planned
    one by one, or in several ``processes``. Raises ``PlanError`` for unusable input, ``BudgetError``, with the most that any
    replica needs, if one does not fit.
    """
    settings = settings or PlannerSettings()
    if not lengths:
        raise PlanError("there are no sequences to plan; the batch must have at least one")
    if min(lengths) < 1:
        raise PlanError(f"a sequence has {min(lengths)} tokens; every sequence must have at least 1")
    if max(lengths) > MOST_TOKENS:
        raise PlanError(f"a sequence has more than {MOST_TOKENS} tokens, the most that can be planned")
    began, started = time.perf_counter(), time.monotonic()
    parts = split_by_time(lengths, settings.replicas, fit_slice_time(cost, max(lengths)))
    at_once = max(1, processes)
    rounds = -(-len(parts) // at_once)
    limit = math.inf if settings.time_limit is None else settings.time_limit
    jobs = [
        (index, lengths, part, cost, settings, started + limit * (index // at_once + 1) / rounds)
        for index, part in enumerate(parts)
    ]
    if processes > 1 and len(jobs) > 1:
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            outcomes = list(pool.map(_plan_part, jobs))
    else:
        outcomes = [_plan_part(job) for job in jobs]
    errors = [outcome for outcome in outcomes if isinstance(outcome, BudgetError)]
    if errors:
        raise max(errors, key=lambda error: error.required)
    planned = [outcome for outcome in outcomes if not isinstance(outcome, BudgetError)]
    plan = Plan(tuple(cost.stage_layers), tuple(lengths), tuple(replica for replica, _, _ in planned))
    try:
        plan.validate()
    except PlanError as error:
        raise PlanError(f"the plan of the planner {settings.planner} cannot run: {error}") from None
    peaks = check(plan, cost, settings.memory_budget) if settings.memory_budget is not None else None
    metadata = {
        "planner": settings.planner,
        "predicted_seconds": [seconds for _, seconds, _ in planned],
        "solver_gaps": [gap for _, _, gap in planned],
        "predicted_peak_bytes": peaks,
        "predicted_shares": predict_shares(plan, cost),
        "planning_seconds": time.perf_counter() - began,
    }
    return Plan(plan.stage_layers, plan.lengths, plan.replicas, metadata)


def _plan_part(
    job: tuple[int, Sequence[int], Sequence[int], CostModel, PlannerSettings, float],
) -> tuple[ReplicaPlan, float, float | None] | BudgetError:
    """One replica's plan, seconds and solver gap, or why nothing fits, naming the replica."""
    index, lengths, part, cost, settings, end = job
    if not part:
        return build_replica([], cost.placement, schedule="interleaved"), 0.0, None
    try:
        found = plan_replica(lengths, part, cost, settings, end=end)
    except BudgetError as error:
        where = f"replica {index} " if settings.replicas > 1 else ""
        return BudgetError(error.required, error.budget, error.stage, error.advice, where)
    return found.replica, found.seconds, None if found.solution is None else found.solution.gap
