"""Plans for stages with several parts, and with backwards in two halves: valid, within the budget, as fast as promised."""

import random

import numpy as np
import pytest

from infinipipe.cost import AnalyticCost
from infinipipe.cost.presets import preset
from infinipipe.plan import ActionKind, Placement, PlanError
from infinipipe.planner import BudgetError, PlannerSettings, plan_step, planner_names, replica_peaks
from infinipipe.planner.recompute import Rows
from infinipipe.simulate import simulate_plan

GB = 10**9
PLACEMENTS = {
    "plain": Placement.plain(4),
    "interleaved": Placement.interleaved(4),
    "v": Placement.v_shaped(4),
    "three parts": Placement.v_shaped(2, 3),
}


def batch(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [min(60_000, 1 + int(rng.lognormvariate(7.0, 1.63))) for _ in range(14)]


def cost_of(placement: Placement) -> AnalyticCost:
    return preset("7b-a100", placement.num_parts, chunk_seconds=0.02, placement=placement)


@pytest.mark.parametrize("schedule", ["auto", "zero-bubble"])
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("planner", [name for name in planner_names() if name != "gpipe-tokens"])
def test_every_planner_keeps_the_budget_on_every_placement(planner: str, name: str, schedule: str) -> None:
    """The last budget is 2% above the least with which bisection finds this planner to fit."""
    cost, lengths = cost_of(PLACEMENTS[name]), batch(3)

    def planned(budget: int | None) -> int | None:
        settings = PlannerSettings(planner=planner, memory_budget=budget, max_slices=4, schedule=schedule, work_limit=4)
        try:
            plan = plan_step(lengths, cost, settings)
        except BudgetError:
            return None
        plan.validate()
        assert plan.placement == cost.placement
        (simulation,) = simulate_plan(plan, cost)
        assert plan.metadata["predicted_seconds"][0] == pytest.approx(simulation.makespan)
        promised = replica_peaks(plan.replicas[0], cost)
        assert all(used <= most for used, most in zip(simulation.peaks, promised, strict=True))
        assert budget is None or max(promised) <= budget
        kinds = {action.kind for row in plan.replicas[0].actions for action in row}
        assert schedule != "zero-bubble" or ActionKind.BACKWARD_WEIGHT in kinds
        return max(promised)

    most = planned(None)
    assert most is not None
    lowest, fits = max(cost.states), most
    for _ in range(3):
        middle = (lowest + fits) // 2
        if planned(middle) is None:
            lowest = middle
        else:
            fits = middle
    assert planner != "elastic" or fits < most, "recompute makes room"
    planned(fits * 102 // 100)


def test_schedules_of_one_part_refuse_several_by_name() -> None:
    with pytest.raises(PlanError, match="use interleaved or zero-bubble for a placement of 8 parts on 4 stages"):
        plan_step(batch(1), cost_of(PLACEMENTS["v"]), PlannerSettings(schedule="1f1b"))
    with pytest.raises(PlanError, match="the schedule gpipe has one part of the model on each stage; use interleaved"):
        plan_step(batch(1), cost_of(PLACEMENTS["v"]), PlannerSettings(planner="gpipe-tokens"))


def test_a_diagonal_that_passes_twice_through_a_stage_counts_twice() -> None:
    rows = Rows(np.array([0, 4, 6]), np.array([2, 0, 2, 1, 1, 1]), np.array([1.0, 2, 4, 8, 3, 5]), np.array([9.0, 1]))
    merged = rows.merged()
    values = np.array([1, 10, 100])
    np.testing.assert_array_equal(merged.product(values), rows.product(values))
    assert merged.indptr.tolist() == [0, 3, 4]
    assert merged.columns.tolist() == [0, 1, 2, 1]
