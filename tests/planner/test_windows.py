"""Cutting and planning for models whose layers have windows."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.cost import AnalyticCost, ModelShape, even_stages, flop_cost
from infinipipe.plan import Chunk, Slice
from infinipipe.planner import PlannerSettings, plan_step
from infinipipe.planner.chunking import SliceTime, balanced_borders
from infinipipe.planner.draft import fit_slice_time
from infinipipe.simulate import simulate_plan

SHAPE = ModelShape(layers=12, hidden=512, intermediate=1536, heads=8, kv_heads=4, head_dim=64, vocab=2000)
MIXED = dataclasses.replace(SHAPE, windows=(256, 256, 256, 256, 256, 0))
LOCAL = dataclasses.replace(SHAPE, windows=(256,))
LENGTH = 64_000
COEFFICIENTS = st.one_of(st.just(0.0), st.floats(1e-9, 1))


def cost_of(shape: ModelShape, stages: int = 3) -> AnalyticCost:
    return flop_cost(shape, even_stages(shape.layers, stages), chunk_seconds=1e-3)


@given(
    COEFFICIENTS,
    st.floats(0.01, 10),
    st.lists(st.tuples(st.integers(1, 300), COEFFICIENTS), unique_by=lambda item: item[0], max_size=3),
    st.integers(1, 1000),
)
def test_the_length_taking_a_time_inverts_it(
    pair: float, token: float, windows: list[tuple[int, float]], length: int
) -> None:
    slice_time = SliceTime(pair, token, tuple(sorted(windows)))
    assert slice_time.length_taking(slice_time(0, length)) == pytest.approx(length)


@pytest.mark.parametrize("windows", [(), (256, 0, 0), (256,), (256, 512, 0), (10**6, 0)])
@pytest.mark.parametrize("sequence_parallel", [1, 4])
def test_the_time_of_a_slice_is_the_cost_models(windows: tuple[int, ...], sequence_parallel: int) -> None:
    cost = dataclasses.replace(
        cost_of(dataclasses.replace(SHAPE, windows=windows)), sequence_parallel=sequence_parallel
    )
    slice_time = fit_slice_time(cost, LENGTH)
    for start, stop in ((0, 100), (0, LENGTH), (100, 700), (LENGTH // 2, LENGTH)):
        chunk = Chunk((Slice(0, start, stop, LENGTH),))
        seconds = sum(
            cost.pass_seconds("forward", chunk, s) + cost.pass_seconds("backward", chunk, s) for s in range(3)
        )
        assert slice_time(start, stop) == pytest.approx(seconds - cost.chunk_seconds(), rel=1e-9)


@pytest.mark.parametrize("shape", [SHAPE, MIXED, LOCAL])
def test_slices_take_equal_times(shape: ModelShape) -> None:
    cost = cost_of(shape)
    slice_time = fit_slice_time(cost, LENGTH)
    edges = [0, *balanced_borders(LENGTH, 8, slice_time), LENGTH]
    seconds = [slice_time(a, b) for a, b in itertools.pairwise(edges)]
    assert max(seconds) / min(seconds) < 1.001
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    if shape is LOCAL:
        assert max(sizes) / min(sizes) < 1.01
    else:
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) / min(sizes) > 2


@pytest.mark.parametrize(("shape", "gain"), [(MIXED, 1.05), (LOCAL, 1.25)])
def test_knowing_the_windows_makes_better_plans(shape: ModelShape, gain: float) -> None:
    cost = cost_of(shape, 4)
    unaware = dataclasses.replace(cost, shape=SHAPE)
    settings = PlannerSettings(planner="elastic-paper", max_slices=16, token_capacity=16_000, work_limit=30)
    aware_seconds, unaware_seconds = (
        simulate_plan(plan_step([LENGTH], known, settings), cost)[0].makespan for known in (cost, unaware)
    )
    assert unaware_seconds > gain * aware_seconds
