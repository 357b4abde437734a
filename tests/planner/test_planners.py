"""All planners: valid plans within the budget, elastic at least as good as the published method, comparisons, limits."""

import dataclasses
import random

import pytest

from infinipipe.cost import AnalyticCost, Link
from infinipipe.cost.presets import preset
from infinipipe.plan import Plan, PlanError, num_splits
from infinipipe.plan.ahead import forwards_ahead
from infinipipe.planner import (
    BudgetError,
    PlannerSettings,
    check,
    plan_replica,
    plan_step,
    planner_names,
    split_by_time,
)
from infinipipe.planner.chunking import SliceTime
from infinipipe.planner.compare import UNPIPED, compare, ideal_seconds
from infinipipe.planner.draft import Draft
from infinipipe.simulate import simulate_plan

GB = 10**9


def batch(seed: int, number: int, longest: int = 60_000) -> list[int]:
    rng = random.Random(seed)
    return [min(longest, 1 + int(rng.lognormvariate(7.0, 1.63))) for _ in range(number)]


def cost_of(stages: int = 4, chunk_seconds: float | None = 0.02) -> AnalyticCost:
    return preset("7b-a100", stages, chunk_seconds=chunk_seconds)


def plan_or_none(lengths: list[int], cost: AnalyticCost, settings: PlannerSettings) -> Plan | None:
    try:
        return plan_step(lengths, cost, settings)
    except BudgetError:
        return None


@pytest.mark.parametrize("planner", planner_names())
def test_every_planner_makes_valid_plans_within_the_budget(planner: str) -> None:
    cost = cost_of()
    for seed, budget in ((0, None), (1, 72 * GB), (2, 20 * GB)):
        wanted = PlannerSettings(planner=planner, memory_budget=budget, max_slices=8)
        lengths = batch(seed, 24)
        plan = plan_or_none(lengths, cost, wanted)
        if plan is None:
            assert budget is not None
            assert planner != "elastic"
            continue
        plan.validate()
        if budget is not None:
            check(plan, cost, budget)
        simulated = simulate_plan(plan, cost)[0].makespan
        assert plan.metadata["predicted_seconds"][0] == pytest.approx(simulated)


@pytest.mark.parametrize("planner", ["elastic", "elastic-paper"])
@pytest.mark.parametrize("latency", [1.0, 10.0, 100.0])
def test_a_step_with_slow_links_keeps_within_the_least_budget(planner: str, latency: float) -> None:
    for seed in range(6):
        cost = dataclasses.replace(preset("7b-a100", 2 + seed % 3), message=Link(latency=latency))
        lengths = batch(seed, 16)
        settings = PlannerSettings(planner=planner, memory_budget=1, max_slices=8, work_limit=8)
        with pytest.raises(BudgetError) as caught:
            plan_step(lengths, cost, settings)
        budget = caught.value.required
        plan = plan_step(lengths, cost, dataclasses.replace(settings, memory_budget=budget))
        assert max(simulate_plan(plan, cost)[0].peaks) <= budget


@pytest.mark.parametrize("seed", range(12))
def test_elastic_is_never_slower_than_the_published_method(seed: int) -> None:
    rng = random.Random(seed)
    cost = cost_of(rng.choice([2, 4]), rng.choice([0.0, 0.05]))
    lengths = batch(seed, rng.randint(1, 40))
    wanted = PlannerSettings(max_slices=8, memory_budget=rng.choice([None, 30 * GB, 16 * GB]))
    seconds: dict[str, float] = {}
    for name in ("elastic-paper", "elastic"):
        try:
            settings = PlannerSettings(planner=name, max_slices=8, memory_budget=wanted.memory_budget)
            seconds[name] = plan_replica(lengths, range(len(lengths)), cost, settings).seconds
        except BudgetError:
            seconds[name] = float("inf")
    assert seconds["elastic"] <= seconds["elastic-paper"]


def test_equal_inputs_give_equal_plans() -> None:
    lengths, wanted = batch(5, 40), PlannerSettings(memory_budget=25 * GB)
    assert plan_step(lengths, cost_of(), wanted).hash == plan_step(lengths, cost_of(), wanted).hash


def test_a_time_limit_still_gives_a_valid_plan() -> None:
    plan = plan_step(batch(6, 60), cost_of(), PlannerSettings(time_limit=1e-6, memory_budget=40 * GB))
    plan.validate()
    check(plan, cost_of(), 40 * GB)


def test_replicas_share_the_time_and_may_be_planned_in_processes() -> None:
    lengths, cost = batch(7, 60), cost_of(2)
    wanted = PlannerSettings(replicas=3, max_slices=4)
    plan = plan_step(lengths, cost, wanted)
    assert plan_step(lengths, cost, wanted, processes=2).hash == plan.hash
    slice_time = SliceTime(1e-9, 1e-4)
    parts = split_by_time(lengths, 3, slice_time)
    assert sorted(i for part in parts for i in part) == list(range(60))
    loads = [sum(slice_time(0, lengths[i]) for i in part) for part in parts]
    assert max(loads) - min(loads) <= slice_time(0, max(lengths))
    lonely = plan_step([500], cost, wanted)
    lonely.validate()
    assert [len(replica.chunks) for replica in lonely.replicas] == [1, 0, 0]


def test_budget_errors_name_the_replica() -> None:
    with pytest.raises(BudgetError, match=r"replica 0 needs about .* at stage \d"):
        plan_step(batch(8, 20), cost_of(2), PlannerSettings(replicas=2, memory_budget=1 * GB))


@pytest.mark.parametrize("schedule", ["tapered", "lookahead"])
@pytest.mark.parametrize("per_stage", [0.0, 1.0, 2.5])
def test_schedules_are_valid_and_the_lookahead_holds_less(schedule: str, per_stage: float) -> None:
    cost, lengths = cost_of(4), batch(9, 60)
    found = plan_replica(lengths, range(60), cost, PlannerSettings(planner="elastic-paper", num_slices=6))
    chunks = found.draft.chunks
    assert num_splits(chunks) == 6
    draft = Draft((chunks,), cost, schedule, forwards_ahead(4, per_stage))
    if per_stage == 2.5 and schedule == "lookahead":
        assert max(draft.peaks(draft.uniform(0))) < max(
            (other := Draft((chunks,), cost, "tapered", forwards_ahead(4, per_stage))).peaks(other.uniform(0))
        )
    wanted = PlannerSettings(schedule=schedule, num_slices=6)
    plan_step(lengths, cost, wanted).validate()
    assert draft.seconds_without_recompute >= ideal_seconds(cost, lengths, sum(lengths))


def test_running_ahead_hides_what_1f1b_shows() -> None:
    """Unequal chunks stop all stages of 1F1B; two forwards ahead for each later stage absorb it."""
    cost, lengths = cost_of(4, 0.0), batch(10, 200)
    paper = plan_replica(lengths, range(200), cost, PlannerSettings(planner="elastic-paper", num_slices=12)).draft
    ahead = Draft(paper.pipelines, cost, "tapered", forwards_ahead(4, 2.0))
    assert ahead.seconds_without_recompute < paper.seconds_without_recompute


def test_comparison_covers_every_planner_and_ranks_by_one_ideal() -> None:
    lengths, cost = batch(11, 30), cost_of()
    outcomes = compare(lengths, cost, PlannerSettings(memory_budget=60 * GB, max_slices=4, token_capacity=60_000))
    assert [outcome.planner for outcome in outcomes] == [*planner_names(), *UNPIPED]
    ideal = ideal_seconds(cost, lengths, 60_000)
    for outcome in outcomes:
        if outcome.refusal:
            continue
        assert outcome.seconds >= ideal * (0.0 if outcome.planner in UNPIPED else 1.0)
        assert outcome.over_ideal == pytest.approx(outcome.seconds / ideal)
        if outcome.planner not in UNPIPED:
            exchange = outcome.over_ideal - 1 - outcome.bubble - outcome.recompute - outcome.fixed
            assert -1e-9 <= exchange < 0.2
    seconds = {outcome.planner: outcome.seconds for outcome in outcomes}
    assert seconds["flexsp"] <= seconds["ulysses-zero3"] * 1.05


def test_packing_refuses_what_it_cannot_cut() -> None:
    with pytest.raises(PlanError, match="cannot cut the longest sequence, 5000 tokens"):
        plan_step([5000, 10], cost_of(), PlannerSettings(planner="packed-1f1b", token_capacity=1000))


@pytest.mark.parametrize("lengths", [[1], [1] * 3000, [200_000], [200_000, *[3] * 2000], [5000] * 100])
@pytest.mark.parametrize("budget", [None, 16 * GB])
def test_extreme_batches_are_planned_or_refused(lengths: list[int], budget: int | None) -> None:
    cost = cost_of()
    plan = plan_or_none(lengths, cost, PlannerSettings(memory_budget=budget))
    if plan is None:
        assert budget is not None
        return
    plan.validate()
    if budget is not None:
        check(plan, cost, budget)


def test_no_planner_exceeds_a_tiny_token_capacity() -> None:
    for planner in planner_names():
        wanted = PlannerSettings(planner=planner, token_capacity=7, num_slices=400, max_slices=400, work_limit=4)
        try:
            plan = plan_step([2041, 3], cost_of(2), wanted)
        except PlanError:
            assert planner == "packed-1f1b"
            continue
        assert max(chunk.num_tokens for chunk in plan.all_chunks()) <= 7


def test_the_least_budget_is_that_of_the_neediest_replica() -> None:
    cost = cost_of(2)
    wanted = PlannerSettings(planner="packed-1f1b", replicas=2, token_capacity=30_000, memory_budget=1)
    lengths = [20_000, 12_000, 12_000]
    with pytest.raises(BudgetError, match=r"^replica [01] needs about .* at stage \d") as caught:
        plan_step(lengths, cost, wanted)
    alone = []
    for part in ([0], [1, 2]):
        with pytest.raises(BudgetError) as error:
            plan_replica(lengths, part, cost, wanted)
        alone.append(error.value.required)
    assert alone[1] > alone[0]
    assert caught.value.required == alone[1]
    plan_step(lengths, cost, dataclasses.replace(wanted, memory_budget=alone[1])).validate()
