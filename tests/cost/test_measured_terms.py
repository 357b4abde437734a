"""The terms that only measured cost files have."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from infinipipe.cost import AnalyticCost, ModelShape, PassTime, flop_cost
from infinipipe.cost.files import load_cost, save_cost
from infinipipe.plan import Chunk, Slice

SHAPE = ModelShape(layers=6, hidden=64, intermediate=192, heads=8, kv_heads=4, head_dim=8, vocab=1000)
CHUNKS = (
    Chunk((Slice(0, 0, 100, 250),)),
    Chunk((Slice(0, 100, 200, 250), Slice(1, 0, 30, 30))),
    Chunk((Slice(0, 200, 250, 250),)),
    Chunk((Slice(4, 0, 80, 80), Slice(5, 0, 700, 700))),
)


def measured(**changes: float) -> AnalyticCost:
    time = PassTime(pair=1e-8, token=1e-6, slice=1e-4, chunk=1e-3, stage=2e-3, **changes)
    cost = flop_cost(SHAPE, (3, 3), element_bytes=4, block_tokens=128)
    return dataclasses.replace(cost, forward=time, backward=time, recompute=dataclasses.replace(time, token=3e-6))


def test_context_costs_its_own() -> None:
    plain, dearer = measured(), measured(context=2e-8)
    assert dearer.pass_seconds("forward", CHUNKS[0], 0) == plain.pass_seconds("forward", CHUNKS[0], 0)
    more = dearer.pass_seconds("forward", CHUNKS[1], 0) - plain.pass_seconds("forward", CHUNKS[1], 0)
    assert more == pytest.approx(3 * 2e-8 * 2 * 100 * 100)


def test_reach_counts_what_a_cut_slice_attends_to() -> None:
    plain, dearer = measured(), measured(reach=1e-6)
    extra = [dearer.pass_seconds("backward", chunk, 1) - plain.pass_seconds("backward", chunk, 1) for chunk in CHUNKS]
    assert extra == pytest.approx([3e-6 * reach for reach in (100, 200, 250, 0)])


def test_a_context_costs_a_call_more() -> None:
    plain, dearer = measured(), measured(resumed=1e-3)
    extra = [dearer.pass_seconds("forward", chunk, 0) - plain.pass_seconds("forward", chunk, 0) for chunk in CHUNKS]
    assert extra == pytest.approx([0.0, 3e-3, 3e-3, 0.0])


def test_head_and_loss_have_a_fixed_cost() -> None:
    plain, dearer = measured(), measured(head_chunk=0.5)
    extra = [
        dearer.pass_seconds("forward", CHUNKS[0], stage) - plain.pass_seconds("forward", CHUNKS[0], stage)
        for stage in (0, 1)
    ]
    assert extra == pytest.approx([0.0, 0.5])
    assert dearer.chunk_seconds() == pytest.approx(plain.chunk_seconds() + 2 * 0.5)


def test_small_chunks_are_less_efficient() -> None:
    plain, dearer = measured(), measured(short=1e-6, full=200.0)
    extra = [dearer.pass_seconds("forward", chunk, 0) - plain.pass_seconds("forward", chunk, 0) for chunk in CHUNKS]
    assert extra == pytest.approx([3e-6 * missing for missing in (100, 70, 150, 0)])


def test_recompute_has_its_own_coefficients() -> None:
    cost = measured()
    forward = dataclasses.replace(cost, recompute=None)
    difference = cost.recompute_seconds(CHUNKS[0], 0, 2) - forward.recompute_seconds(CHUNKS[0], 0, 2)
    assert difference == pytest.approx(2 * 2e-6 * 100)


def test_the_table_has_every_term() -> None:
    cost = measured(context=2e-8, reach=1e-6, resumed=1e-3, short=1e-6, full=200.0, head_chunk=1e-3)
    table = cost.table(CHUNKS)
    for stage in range(2):
        for number, chunk in enumerate(CHUNKS):
            assert table.seconds["forward"][stage, number] == pytest.approx(cost.pass_seconds("forward", chunk, stage))
            assert table.layer_recompute[stage, number] == pytest.approx(cost.recompute_seconds(chunk, stage, 1))
            assert table.transient["forward"][0][stage, number] == pytest.approx(
                cost.transient_bytes("forward", chunk, stage, 0), abs=1
            )


def test_a_small_chunk_needs_its_share_of_the_head_block() -> None:
    cost = measured()
    block, message = cost.memory.head_block, cost.memory.forward_kept
    small, large = Chunk((Slice(0, 0, 32, 32),)), CHUNKS[3]
    assert cost.transient_bytes("forward", small, 1, 0) == round(block / 4 + 32 * message)
    assert cost.transient_bytes("forward", large, 1, 0) == round(block + 780 * message)


def test_a_file_keeps_every_term(tmp_path: Path) -> None:
    cost = measured(context=2e-8, reach=1e-6, resumed=1e-3, short=1e-6, full=200.0, head_chunk=1e-3)
    save_cost(cost, tmp_path / "cost.json")
    assert load_cost(tmp_path / "cost.json") == cost
    np.testing.assert_array_equal(
        load_cost(tmp_path / "cost.json").table(CHUNKS).seconds["backward"],
        cost.table(CHUNKS).seconds["backward"],
    )
