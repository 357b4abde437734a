"""Sequence parallelism without a pipeline: known cases, and what heterogeneous groups are for."""

import dataclasses

import pytest

from infinipipe.cost import AnalyticCost, Link, preset
from infinipipe.cost.network import Network
from infinipipe.plan import PlanError
from infinipipe.planner.baselines.unpiped import Cluster, flexsp, ulysses_zero3

NETWORK = Network({2: 154e9, 8: 121e9, 16: 8.7e9}, micro_batch_seconds=0.6)


def cluster(budget: int | None, *, all_to_all: bool = True) -> Cluster:
    cost = preset("7b-a100", 4)
    if not all_to_all:
        cost = dataclasses.replace(cost, all_to_all_bytes=0.0, all_to_all=Link())
    return Cluster(cost, NETWORK, budget)


def fixed_and_computing(cost: AnalyticCost, lengths: list[int]) -> tuple[float, float]:
    return NETWORK.micro_batch_seconds, cost.compute_seconds(lengths)


@pytest.mark.parametrize("planner", [ulysses_zero3, flexsp])
def test_one_sequence_takes_all_devices_in_one_micro_batch(planner) -> None:  # type: ignore[no-untyped-def]
    free = cluster(None, all_to_all=False)
    fixed, computing = fixed_and_computing(free.cost, [30_000])
    assert planner(free, [30_000]) == pytest.approx(fixed + computing / 32)


@pytest.mark.parametrize("planner", [ulysses_zero3, flexsp])
def test_equal_sequences_each_take_a_device(planner) -> None:  # type: ignore[no-untyped-def]
    lengths = [2_000] * 32
    free = cluster(None)
    fixed, computing = fixed_and_computing(free.cost, lengths)
    assert planner(free, lengths) == pytest.approx(fixed + computing / 32)


def test_groups_of_unequal_size_pay_for_a_long_sequence_beside_short_ones() -> None:
    lengths = [100_000] + [1_500] * 200
    tight = cluster(30 * 10**9)
    assert tight.token_capacity(8) < 100_000 < tight.token_capacity(32)
    assert flexsp(tight, lengths) < ulysses_zero3(tight, lengths)


def test_what_no_group_holds_is_refused() -> None:
    with pytest.raises(PlanError, match="a sequence of 9000000 tokens does not fit 32 devices"):
        flexsp(cluster(20 * 10**9), [9_000_000])
