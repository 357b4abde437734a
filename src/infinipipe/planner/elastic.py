"""``elastic``: the published method's chunks under schedules that hide delays and hold less, judged by simulated makespan."""

from __future__ import annotations

import math

from infinipipe.planner.draft import Draft
from infinipipe.planner.paper import plan_paper
from infinipipe.planner.schedules import lead
from infinipipe.planner.search import Found, Replica, descend

VARIANTS: tuple[tuple[str, float], ...] = (
    ("lookahead", 2.0),
    ("window", 2.0),
    ("lookahead", 3.0),
    ("lookahead", 1.5),
    ("window", 1.5),
    ("window", 1.0),
    ("lookahead", 1.0),
)
"""Schedules and how many forwards a stage runs ahead for each stage after it."""
LEANEST = ("lookahead", 0.0)
REFINED = 2
"""How many of the best slice numbers are tried with all variants."""


def plan_elastic(problem: Replica) -> Found:
    """Search over ``K`` and schedules; never slower than ``elastic-paper``, whose plan is one of those compared."""
    numbers = problem.slice_numbers()
    roomy = problem.settings.memory_budget is None

    def draft(num_slices: int, variant: tuple[str, float]) -> Draft:
        chunking = problem.chunking(num_slices)
        assert chunking is not None
        schedule, per_stage = variant
        return problem.draft([chunking.ordered()], schedule, lead(len(problem.cost.stage_layers), per_stage))

    def seconds(num_slices: int) -> float:
        found = problem.consider(draft(num_slices, VARIANTS[1 if roomy else 0]))
        return math.inf if found is None else found.seconds

    ranked = descend(numbers, seconds, problem.limits)
    for num_slices in ranked[:REFINED]:
        for variant in VARIANTS[:1] if roomy else VARIANTS[1:]:
            if problem.limits.spend():
                problem.consider(draft(num_slices, variant))
    if not ranked:
        for num_slices in reversed(numbers):
            for variant in (VARIANTS[-1], LEANEST):
                problem.consider(draft(num_slices, variant))
    plan_paper(problem)
    return problem.result()
