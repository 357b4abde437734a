"""Any lengths, any budget: a valid plan within it, or the error that says what would do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinipipe.cost import AnalyticCost, ModelShape, flop_cost
from infinipipe.plan import PlanError
from infinipipe.planner import BudgetError, PlannerSettings, check, plan_step
from infinipipe.planner.settings import Recompute

SHAPE = ModelShape(layers=6, hidden=64, intermediate=192, heads=8, kv_heads=4, head_dim=8, vocab=500)
MIB = 2**20


def cost_of(*stage_layers: int) -> AnalyticCost:
    return flop_cost(SHAPE, stage_layers, element_bytes=4, flops_per_second=1e9, chunk_seconds=1e-3, block_tokens=64)


lengths_strategy = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 4000)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(
    lengths_strategy,
    st.sampled_from([(6,), (3, 3), (1, 2, 2, 1), (2, 0, 4)]),
    st.integers(1, 3),
    st.sampled_from([None, 6 * MIB, 12 * MIB, 30 * MIB]),
    st.sampled_from([None, 64, 1000]),
)
def test_a_valid_plan_within_the_budget_or_a_clear_error(
    lengths: list[int], stages: tuple[int, ...], replicas: int, budget: int | None, capacity: int | None
) -> None:
    cost = cost_of(*stages)
    wanted = PlannerSettings(memory_budget=budget, token_capacity=capacity, replicas=replicas, max_slices=8)
    refusal: PlanError | None = None
    try:
        plan = plan_step(lengths, cost, wanted)
    except PlanError as error:
        refusal = error
    if isinstance(refusal, BudgetError):
        assert budget is not None
        assert refusal.required > budget
        assert 0 <= refusal.stage < len(stages)
        return
    if refusal is not None:
        assert "token_capacity" in str(refusal)
        assert capacity is not None
        assert max(lengths) > capacity
        return
    plan.validate()
    if budget is not None:
        check(plan, cost, budget)
    if capacity is not None:
        assert all(chunk.num_tokens <= capacity for chunk in plan.all_chunks())


def test_the_budget_that_the_error_names_is_enough() -> None:
    cost = cost_of(2, 2, 2)
    lengths = [3000, 700, 500, 100, 40, 3]
    with pytest.raises(BudgetError, match=r"needs about .* at stage \d, got") as caught:
        plan_step(lengths, cost, PlannerSettings(memory_budget=MIB, num_slices=4))
    plan = plan_step(lengths, cost, PlannerSettings(memory_budget=caught.value.required, num_slices=4))
    check(plan, cost, caught.value.required)
    with pytest.raises(BudgetError) as tighter:
        check(plan, cost, caught.value.required // 2)
    assert tighter.value.required > caught.value.required // 2


@pytest.mark.parametrize("recompute", ["none", "all", 1])
def test_fixed_recompute_is_kept_or_refused(recompute: Recompute) -> None:
    cost = cost_of(3, 3)
    wanted = PlannerSettings(recompute=recompute, num_slices=4)
    plan = plan_step([2000, 300, 20], cost, wanted)
    layers = {"none": 0, "all": 3}.get(str(recompute), 1)
    assert {value for row in plan.replicas[0].recompute for value in row} == {layers}


def test_settings_are_refused_in_words() -> None:
    with pytest.raises(PlanError, match="max_slices"):
        PlannerSettings(max_slices=0)
    with pytest.raises(PlanError, match="recompute"):
        PlannerSettings(recompute="some")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no planner 'x'"):
        plan_step([1], cost_of(6), PlannerSettings(planner="x"))
    with pytest.raises(PlanError, match="no sequences"):
        plan_step([], cost_of(6))
