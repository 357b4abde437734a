"""What model states weigh: the formula, every command's answer, and what real runs hold."""

from __future__ import annotations

import pytest
import torch
from states import KNOWN, RUNS, SMALL, measure, promises

from infinipipe.cost import Holding, ModelShape, state_bytes
from infinipipe.runtime.pool import WorkerPool

LLAMA = ModelShape(layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)


def test_a_process_of_its_own_holds_all_of_a_stage() -> None:
    for element_bytes, per_parameter in ((4, 16), (2, 18), (8, 32)):
        held = state_bytes(LLAMA, (8, 8, 8, 8), None, Holding(element_bytes=element_bytes))
        assert sum(held) == per_parameter * LLAMA.parameters


def test_processes_share_all_but_gathered_weights_and_whole_gradients() -> None:
    (kept,) = state_bytes(LLAMA, (32,), None, Holding(sequence_parallel=8))
    count = LLAMA.parameters
    assert kept == pytest.approx(count * (12 / 8 + 4 + 2), rel=0.05)
    (released,) = state_bytes(LLAMA, (32,), None, Holding(sequence_parallel=8, gather_policy="release"))
    assert released == pytest.approx(count * (12 / 8 + 4), rel=0.05)
    (sharded,) = state_bytes(LLAMA, (32,), None, Holding(sequence_parallel=8, gradient_policy="sharded"))
    assert sharded == pytest.approx(count * (16 / 8 + 2), rel=0.1)


@pytest.mark.parametrize("name", ["Llama 7B", "Qwen3-30B-A3B", "Gemma 3 4B"])
def test_every_command_gives_the_same_answer(name: str) -> None:
    config, dtype = KNOWN[name]
    for layout in ((1, 1, 1), (4, 8, 1), (4, 2, 2)):
        assert len(set(promises(config, dtype, layout, name).values())) == 1


def test_real_runs_hold_what_is_promised() -> None:
    torch.set_num_threads(1)
    with WorkerPool(2) as pool:
        for number, name in enumerate(SMALL):
            for layout in RUNS[1:3]:
                for row in measure(pool, name, ("float32", "bfloat16")[number], layout, 0):
                    assert row.promised == pytest.approx(row.measured, rel=0.03)
