"""The analytic cost model against the formulas of section 4 and against itself chunk by chunk."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from infinipipe.cost import (
    AnalyticCost,
    CostError,
    Holding,
    Link,
    ModelShape,
    PassTime,
    even_stages,
    flop_cost,
    state_bytes,
    table_by_chunk,
)
from infinipipe.cost.files import load_cost, save_cost
from infinipipe.plan import Chunk, Placement, Slice
from tests.cost.tables import assert_same_table

SHAPE = ModelShape(layers=8, hidden=64, intermediate=192, heads=8, kv_heads=4, head_dim=8, vocab=1000)


def make_cost(sequence_parallel: int = 1) -> AnalyticCost:
    link = Link(latency=1e-5, seconds_per_byte=1e-9)
    return flop_cost(
        SHAPE,
        (2, 3, 3),
        element_bytes=4,
        flops_per_second=1e9,
        chunk_seconds=3e-3,
        message=link,
        all_to_all=link,
        sequence_parallel=sequence_parallel,
    )


CHUNKS = (
    Chunk((Slice(0, 0, 100, 250),)),
    Chunk((Slice(0, 100, 200, 250), Slice(1, 0, 30, 30))),
    Chunk((Slice(0, 200, 250, 250), Slice(2, 0, 1, 1), Slice(3, 0, 40, 40))),
    Chunk((Slice(4, 0, 80, 80),)),
)


@pytest.mark.parametrize("sequence_parallel", [1, 4])
def test_the_table_holds_what_the_methods_say(sequence_parallel: int) -> None:
    cost = make_cost(sequence_parallel)
    fast, slow = cost.table(CHUNKS), table_by_chunk(cost, CHUNKS)
    assert_same_table(fast, slow)


def test_time_is_equation_1() -> None:
    cost = make_cost()
    chunk = CHUNKS[1]
    pairs = 200**2 - 100**2 + 30**2
    tokens = 130
    layer = (2 * 64 * pairs + 2 * SHAPE.mean_work * tokens) / 1e9 + 1e-3 / 8
    assert cost.pass_seconds("forward", chunk, 1) == pytest.approx(3 * layer)
    assert cost.pass_seconds("backward", chunk, 1) == pytest.approx(6 * layer)
    assert cost.recompute_seconds(chunk, 1, 2) == pytest.approx(2 * layer)
    head = 3 * 2 * SHAPE.embedding_weights * tokens / 1e9
    assert cost.pass_seconds("forward", chunk, 2) == pytest.approx(3 * layer + head)


def test_all_to_alls_cost_their_bytes_and_latencies() -> None:
    alone, shared = make_cost(1), make_cost(4)
    fixed = 2 * 1e-3 / 8
    chunk = CHUNKS[0]
    computing = (alone.pass_seconds("forward", chunk, 0) - fixed) / 4 + fixed
    exchange = 2 * (4 * 1e-5 + 2 * 4 * (64 + 32) * 100 / 4 * 1e-9)
    assert shared.pass_seconds("forward", chunk, 0) == pytest.approx(computing + exchange)


def test_a_recomputed_layer_holds_its_input_and_cut_sequences_keep_keys_in_the_store() -> None:
    cost = make_cost()
    split, batched = CHUNKS[0], CHUNKS[3]
    for chunk in (split, batched):
        inputs = cost.activation_bytes(chunk, 1, 3) - round(cost.memory.chunk * chunk.num_tokens)
        assert inputs == 3 * 4 * 64 * chunk.num_tokens
    kept = [cost.activation_bytes(chunk, 1, 0) / chunk.num_tokens for chunk in (split, batched)]
    assert kept[1] - kept[0] == pytest.approx(3 * 4 * 2 * 32)
    assert cost.kv_bytes(250, 1) == 3 * 4 * 2 * 32 * 250
    head = 3 * 4 * 64 + 4
    assert cost.activation_bytes(split, 2, 0) - cost.activation_bytes(split, 1, 0) == head * 100


def test_parameters_of_known_models() -> None:
    llama = ModelShape(layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)
    assert llama.parameters == 6_738_415_616
    tied = dataclasses.replace(llama, tied=True)
    assert llama.parameters - tied.parameters == 32000 * 4096


def test_stages_are_even_with_lighter_ends() -> None:
    assert even_stages(8, 4) == (2, 2, 2, 2)
    assert even_stages(9, 4) == (2, 3, 2, 2)
    assert even_stages(10, 4) == (2, 3, 3, 2)
    assert even_stages(11, 4) == (3, 3, 3, 2)
    with pytest.raises(CostError, match="at most 3 stages"):
        even_stages(3, 4)
    with pytest.raises(CostError, match="must be at least 1"):
        even_stages(3, 0)
    with pytest.raises(CostError, match="has 8 layers"):
        flop_cost(SHAPE, (2, 2))


@pytest.mark.parametrize("sequence_parallel", [1, 8])
def test_halves_of_a_backward_add_up_to_it(sequence_parallel: int) -> None:
    """Its all-to-alls, dear here, are all in the first half."""
    link = Link(latency=1e-3, seconds_per_byte=1e-9)
    cost = dataclasses.replace(make_cost(), sequence_parallel=sequence_parallel, all_to_all=link)
    for chunk in CHUNKS:
        for part in range(3):
            whole, first, second = (
                cost.pass_seconds(name, chunk, part) for name in ("backward", "backward_input", "backward_weight")
            )
            assert first + second == pytest.approx(whole)
            assert 0 < second < first
    measured = dataclasses.replace(cost, backward_weight=PassTime(pair=0.0, token=1e-5, chunk=1e-5))
    chunk = CHUNKS[3]
    second = measured.pass_seconds("backward_weight", chunk, 0)
    assert second == pytest.approx(2 * (80e-5 / sequence_parallel + 1e-5))
    assert measured.pass_seconds("backward_input", chunk, 0) + second == pytest.approx(
        cost.pass_seconds("backward", chunk, 0)
    )


def test_operands_of_weight_gradients_are_those_of_every_linear_layer() -> None:
    """Per token and layer: what goes into q, k, v (once), o, gate and up (once), down, and every one's output gradient."""
    widths = 64 + 64 + 64 + 192 + (64 + 2 * 32 + 64 + 2 * 192 + 64)
    assert make_cost().weight_operand_bytes(CHUNKS[3], 1) == 3 * 4 * widths * 80


def test_a_first_half_needs_what_piles_up_behind_recomputed_layers() -> None:
    """From one recomputed layer on, the peak is at the layer that is computed again last, with operands behind it."""
    cost = make_cost()
    work = 80.0
    saving = (cost.activation_bytes(CHUNKS[3], 1, 0) - cost.activation_bytes(CHUNKS[3], 1, 3)) / 3
    peaks = [
        cost.activation_bytes(CHUNKS[3], 1, layers) + cost.transient_bytes("backward_input", CHUNKS[3], 1, layers)
        for layers in range(4)
    ]
    operands = cost.memory.weight_operands * work
    whole = cost.activation_bytes(CHUNKS[3], 1, 3) + cost.transient_bytes("backward", CHUNKS[3], 1, 3)
    behind = 2 * (operands - cost.memory.layer_input * work)
    down_input = 4 * 192 * work
    assert peaks[3] == pytest.approx(whole + down_input + behind, abs=2)
    assert peaks[1] == pytest.approx(max(peaks[0] - saving, peaks[3]), abs=2)
    table = cost.table(CHUNKS)
    for layers in range(4):
        at = table.transient_at(
            "backward_input", np.minimum(np.array(cost.stage_layers)[:, None], np.full((3, 4), layers))
        )
        for part, count in enumerate(cost.stage_layers):
            expected = [cost.transient_bytes("backward_input", chunk, part, min(layers, count)) for chunk in CHUNKS]
            np.testing.assert_allclose(at[part], expected, atol=1.0)


def test_parts_on_one_stage_share_its_states() -> None:
    tied = dataclasses.replace(SHAPE, tied=True, layers=8)
    plain = state_bytes(tied, (2, 2, 2, 2), None, Holding(element_bytes=4))
    placed = state_bytes(tied, (2, 2, 2, 2), Placement.v_shaped(2), Holding(element_bytes=4))
    assert placed[0] == plain[0] + plain[3] - 16 * tied.embedding_weights, (
        "the weight that both ends share is there once"
    )
    assert placed[1] == plain[1] + plain[2]
    cost = flop_cost(tied, (2, 2, 2, 2), element_bytes=4, placement=Placement.v_shaped(2))
    assert cost.states == placed
    with pytest.raises(CostError, match="names 4 parts, but stage_layers has 2 entries"):
        dataclasses.replace(cost, stage_layers=(4, 4))


def test_a_file_keeps_the_placement(tmp_path: Path) -> None:
    cost = dataclasses.replace(
        flop_cost(SHAPE, (2, 2, 2, 2), placement=Placement.interleaved(2)),
        backward_weight=PassTime(pair=0.0, token=1e-6),
    )
    save_cost(cost, tmp_path / "cost.json")
    assert load_cost(tmp_path / "cost.json") == cost
    text = (tmp_path / "cost.json").read_text().replace('"parts": [', '"parts": [7, ', 1)
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(CostError, match=r"placement\.parts must be a list of lists of whole numbers"):
        load_cost(tmp_path / "cost.json")
