"""Which layers go to which stage: against every possible split."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.cost import CostError, ModelShape, balanced_stages, even_stages, flop_cost, typical_length
from infinipipe.plan import Chunk, Slice

SMALL = ModelShape(layers=10, hidden=64, intermediate=192, heads=8, kv_heads=4, head_dim=8, vocab=1000)
QWEN = ModelShape(layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064)


def stage_operations(shape: ModelShape, split: tuple[int, ...], context: int) -> list[int]:
    """Forward and backward of every stage, as the cost model has them."""
    cost, chunk = flop_cost(shape, split, flops_per_second=1.0), Chunk((Slice(0, 0, context, context),))
    return [
        round(cost.pass_seconds("forward", chunk, stage) + cost.pass_seconds("backward", chunk, stage))
        for stage in range(len(split))
    ]


def every_split(layers: int, stages: int) -> list[tuple[int, ...]]:
    borders = itertools.combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *inner, layers))) for inner in borders]


@given(
    st.integers(1, 9),
    st.data(),
    st.lists(st.sampled_from([0, 4, 50, 300]), max_size=6),
    st.integers(1, 2000),
    st.integers(1, 8000),
)
def test_no_split_is_better(layers: int, data: st.DataObject, windows: list[int], context: int, vocab: int) -> None:
    stages = data.draw(st.integers(1, layers))
    shape = dataclasses.replace(SMALL, layers=layers, vocab=vocab, windows=tuple(windows))

    def rank(split: tuple[int, ...]) -> tuple[list[int], int, tuple[int, ...]]:
        return sorted(stage_operations(shape, split, context), reverse=True), split[-1], split

    assert balanced_stages(shape, stages, context) == min(every_split(layers, stages), key=rank)


def test_the_head_takes_layers_from_the_last_stage() -> None:
    assert balanced_stages(QWEN, 4, 1000) == (7, 8, 8, 5)
    assert balanced_stages(QWEN, 8, 1000) == (3, 4, 4, 4, 4, 4, 4, 1)
    assert max(stage_operations(QWEN, balanced_stages(QWEN, 8, 1000), 1000)) < 0.8 * max(
        stage_operations(QWEN, even_stages(28, 8), 1000)
    )


def test_without_a_head_to_speak_of_stages_are_even() -> None:
    for stages in range(1, 11):
        split = balanced_stages(dataclasses.replace(SMALL, vocab=1), stages, 4000)
        assert sorted(split) == sorted(even_stages(10, stages))
        assert split[-1] == min(split)


def test_layers_with_windows_go_together() -> None:
    gemma = dataclasses.replace(SMALL, layers=12, windows=(64, 64, 64, 64, 64, 0), vocab=1)
    split = balanced_stages(gemma, 4, 100_000)
    assert split == (5, 1, 5, 1)
    assert balanced_stages(gemma, 4, 64) == (3, 3, 3, 3)


def test_typical_lengths_attend_as_much_a_token() -> None:
    lengths = [100, 300, 5000, 20]
    typical = typical_length(lengths)
    assert typical == pytest.approx(sum(n * n for n in lengths) / sum(lengths), abs=0.5)
    assert typical_length([7, 7, 7]) == 7


def test_impossible_stages_are_refused() -> None:
    with pytest.raises(CostError, match="11 stages are more than the model's 10 layers; use at most 10 stages"):
        balanced_stages(SMALL, 11, 100)
    with pytest.raises(CostError, match="the context is 0; it must be at least 1 token"):
        balanced_stages(SMALL, 2, 0)
