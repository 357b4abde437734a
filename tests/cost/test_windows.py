"""Sliding windows: the features against counted pairs, and the cost model against itself with and without them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.cost import (
    AnalyticCost,
    CostError,
    ModelShape,
    PassTime,
    WorkingSet,
    flop_cost,
    load_cost,
    save_cost,
    table_by_chunk,
)
from infinipipe.cost.features import chunk_features, chunks_features
from infinipipe.plan import Chunk, Slice
from tests.cost.tables import assert_same_table

SHAPE = ModelShape(
    layers=7, hidden=64, intermediate=192, heads=8, kv_heads=4, head_dim=8, vocab=1000, windows=(40, 40, 0)
)
CHUNKS = (
    Chunk((Slice(0, 0, 100, 250),)),
    Chunk((Slice(0, 100, 200, 250), Slice(1, 0, 30, 30))),
    Chunk((Slice(0, 200, 250, 250), Slice(2, 0, 1, 1), Slice(3, 0, 90, 90))),
    Chunk((Slice(4, 0, 80, 80),)),
)
TIME = PassTime(pair=1e-8, token=1e-6, chunk=1e-3, context=2e-9, reach=3e-7, resumed=1e-4)


def cost_of(shape: ModelShape, time: PassTime | None = None) -> AnalyticCost:
    cost = flop_cost(shape, (2, 3, 2), element_bytes=4, flops_per_second=1e9, chunk_seconds=3e-3)
    return cost if time is None else dataclasses.replace(cost, forward=time, backward=time, recompute=time)


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    """A chunk of up to four slices, of which the first may be of a cut sequence."""
    length = draw(st.integers(1, 40))
    start = draw(st.integers(0, length - 1))
    stop = draw(st.integers(start + 1, length))
    wholes = draw(st.lists(st.integers(1, 20), max_size=3))
    return Chunk((Slice(0, start, stop, length), *(Slice(i, 0, n, n) for i, n in enumerate(wholes, 1))))


@given(st.lists(chunks(), min_size=1, max_size=4), st.integers(0, 45))
def test_features_are_counted_pairs(group: list[Chunk], window: int) -> None:
    table = chunks_features(group, (window,))[window]
    for number, chunk in enumerate(group):
        seen = [
            (piece, query, key)
            for piece in chunk.slices
            for query in range(piece.start, piece.stop)
            for key in range(query + 1)
            if not window or query - key < window
        ]
        cut = [(query, key) for piece, query, key in seen if piece is chunk.partial]
        start = 0 if chunk.partial is None else chunk.partial.start
        features = chunk_features(chunk, window)
        assert features.pairs == 2 * len(seen) - chunk.num_tokens
        assert features.crossed == 2 * sum(key < start for _, key in cut)
        assert features.reach == len({key for _, key in cut})
        assert features.resumed == any(key < start for _, key in cut)
        for field in dataclasses.fields(features):
            assert getattr(table, field.name)[number] == getattr(features, field.name), field.name


def test_stages_cost_what_their_layers_do() -> None:
    cost = cost_of(SHAPE)
    assert cost.layer_windows == ((40, 40), (0, 40, 40), (0, 40))
    chunk = CHUNKS[1]
    full = 200**2 - 100**2 + 30**2
    local = (40**2 + 79 * 160) - (40**2 + 79 * 60) + 30**2

    def layers(pairs: list[int]) -> float:
        return sum((2 * 64 * p + 2 * SHAPE.mean_work * 130) / 1e9 + 1e-3 / 7 for p in pairs)

    assert cost.pass_seconds("forward", chunk, 0) == pytest.approx(layers([local, local]))
    assert cost.pass_seconds("backward", chunk, 1) == pytest.approx(2 * layers([full, local, local]))
    assert cost.recompute_seconds(chunk, 1, 1) == pytest.approx(layers([full]))
    assert cost.recompute_seconds(chunk, 1, 2) == pytest.approx(layers([full, local]))


@pytest.mark.parametrize("time", [None, TIME])
def test_the_table_holds_what_the_methods_say(time: PassTime | None) -> None:
    cost = cost_of(SHAPE, time)
    fast, slow = cost.table(CHUNKS), table_by_chunk(cost, CHUNKS)
    assert_same_table(fast, slow)
    first = [[2, 0, 1, 2], [3, 2, 1, 0], [1, 1, 2, 0]]
    expected = [
        [cost.recompute_seconds(chunk, stage, layers) for chunk, layers in zip(CHUNKS, row, strict=True)]
        for stage, row in enumerate(first)
    ]
    np.testing.assert_allclose(fast.recompute_seconds(first), expected, rtol=1e-12)
    mean = [[cost.recompute_seconds(chunk, stage, n) / n for chunk in CHUNKS] for stage, n in enumerate((2, 3, 2))]
    np.testing.assert_allclose(fast.layer_recompute, mean, rtol=1e-12)


@pytest.mark.parametrize("windows", [(), (40,), (40, 40, 0)])
def test_the_table_agrees_on_stages_without_layers(windows: tuple[int, ...]) -> None:
    cost = flop_cost(dataclasses.replace(SHAPE, windows=windows), (4, 0, 3, 0), element_bytes=4)
    cost = dataclasses.replace(cost, memory=dataclasses.replace(cost.memory, backward=WorkingSet(context=1e5)))
    fast, slow = cost.table(CHUNKS), table_by_chunk(cost, CHUNKS)
    assert_same_table(fast, slow)


@pytest.mark.parametrize("windows", [(), (0,), (10**6,), (0, 0, 10**6)])
def test_windows_that_limit_nothing_change_nothing(windows: tuple[int, ...]) -> None:
    plain, cost = (cost_of(dataclasses.replace(SHAPE, windows=w), TIME) for w in ((), windows))
    expected, table = plain.table(CHUNKS), cost.table(CHUNKS)
    assert_same_table(table, expected, rtol=0 if 10**6 not in windows else 1e-14, atol=0)
    assert cost.compute_seconds([250, 90]) == pytest.approx(plain.compute_seconds([250, 90]), rel=1e-14)


def test_a_shape_without_windows_costs_as_the_formulas_say() -> None:
    """The numbers of equation 1, exactly, in the order in which they are added."""
    cost = cost_of(dataclasses.replace(SHAPE, windows=()), TIME)
    table = cost.table(CHUNKS)
    for number, chunk in enumerate(CHUNKS):
        first = chunk.slices[0]
        pairs = sum(piece.stop**2 - piece.start**2 for piece in chunk.slices)
        partial, reach = (0, 0) if first.is_whole else (first.num_tokens, first.stop)
        layer = TIME.pair * pairs + TIME.token * chunk.num_tokens + 0.0 * len(chunk.slices) + TIME.chunk
        layer = layer + (TIME.context * (2 * partial * (reach - partial)) + TIME.reach * reach)
        layer = layer + TIME.resumed * (reach > partial)
        assert table.seconds["forward"][1, number] == layer * 3
        assert cost.pass_seconds("forward", chunk, 1) == layer * 3
        assert table.recompute[1, 2, number] == cost.recompute_seconds(chunk, 1, 2) == layer * 2


def test_a_model_of_windows_computes_whole_sequences_in_linear_time() -> None:
    shape = dataclasses.replace(SHAPE, windows=(40,))
    cost = flop_cost(shape, (7,), flops_per_second=1e9)
    one, two, three = (cost.compute_seconds([length]) for length in (1000, 2000, 3000))
    assert three - two == pytest.approx(two - one)
    for lengths in ([1000], [30, 70, 500]):
        chunk = Chunk(tuple(Slice(i, 0, n, n) for i, n in enumerate(lengths)))
        alone = flop_cost(SHAPE, (7,), flops_per_second=1e9)
        seconds = alone.pass_seconds("forward", chunk, 0) + alone.pass_seconds("backward", chunk, 0)
        assert alone.compute_seconds(lengths) == pytest.approx(seconds)


def test_only_full_layers_reach_the_whole_context_in_backward() -> None:
    chunk = Chunk((Slice(0, 5000, 5100, 5100),))
    needs = [
        cost_of(dataclasses.replace(SHAPE, windows=windows)).transient_bytes("backward", chunk, 1, 0)
        for windows in ((), (40, 40, 0), (40,), (5100,))
    ]
    assert needs[0] == needs[1] == needs[3]
    assert needs[2] < needs[0]


def test_a_file_keeps_windows(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    cost = cost_of(SHAPE)
    save_cost(cost, path)
    assert load_cost(path) == cost
    data = json.loads(path.read_text())
    del data["shape"]["windows"]
    path.write_text(json.dumps(data))
    assert load_cost(path) == dataclasses.replace(cost, shape=dataclasses.replace(SHAPE, windows=()))


@pytest.mark.parametrize("windows", [4, [-1], [1.5], [True], ["4"], None])
def test_bad_windows_in_a_file_are_named(tmp_path: Path, windows: Any) -> None:
    path = tmp_path / "cost.json"
    save_cost(cost_of(SHAPE), path)
    data = json.loads(path.read_text())
    data["shape"]["windows"] = windows
    path.write_text(json.dumps(data))
    with pytest.raises(CostError, match=r"cost.json: shape.windows must be a list of whole numbers"):
        load_cost(path)


def test_bad_windows_are_refused() -> None:
    with pytest.raises(CostError, match="a window must be at least 1"):
        dataclasses.replace(SHAPE, windows=(-1,))
