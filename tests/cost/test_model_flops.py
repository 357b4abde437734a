"""Operations of a step against torch's counter over the plain model, and pairs against masks written out."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from infinipipe.cost.model_flops import PASSES, attended_pairs, step_flops
from infinipipe.runtime.footprint import footprint
from infinipipe.verify import FAMILIES

LENGTHS = [37, 5, 37, 1, 60]


@pytest.mark.parametrize("window", [0, 1, 7, 40])
@pytest.mark.parametrize("length", [1, 6, 40])
def test_pairs_are_those_of_the_mask(length: int, window: int) -> None:
    query, key = torch.arange(length)[:, None], torch.arange(length)
    mask = (key <= query) & (query - key < (window or length))
    assert attended_pairs(length, window) == int(mask.sum())


def counted(config: PretrainedConfig, length: int) -> int:
    """Operations of a forward and a backward of the plain model, as torch counts them."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = torch.zeros(1, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mistral"])
def test_operations_are_those_that_torch_counts_less_what_masks_hide(family: str) -> None:
    config = FAMILIES[family]()
    shape = footprint(config, torch.float32).shape
    whole = 0
    for length in LENGTHS:
        hidden = sum(length**2 - attended_pairs(length, shape.layer_window(layer)) for layer in range(shape.layers))
        whole += counted(config, length) - PASSES * 4 * shape.query_width * hidden
    assert step_flops(shape, LENGTHS) == whole
