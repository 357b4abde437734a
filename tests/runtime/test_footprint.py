"""What is read from models themselves: parameters, operations, windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, MixtralConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from infinipipe.cost import MemoryUse, WorkingSet, memory_use
from infinipipe.model import UnsupportedModelError, meta_model
from infinipipe.runtime.footprint import footprint
from infinipipe.verify.families import FAMILIES

LARGE: dict[str, tuple[PretrainedConfig, float, float]] = {
    "llama 7b": (LlamaConfig(), 6.74, 6.48),
    "qwen3-30b-a3b": (
        Qwen3MoeConfig(num_hidden_layers=48, head_dim=128, num_experts=128, num_experts_per_tok=8),
        30.53,
        2.73,
    ),
    "mixtral 8x7b": (MixtralConfig(), 46.70, 12.62),
}


@pytest.mark.parametrize("name", LARGE)
def test_all_experts_weigh_and_active_ones_work(name: str) -> None:
    config, billions, active = LARGE[name]
    shape = footprint(config, torch.bfloat16).shape
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.005)
    assert shape.parameters == sum(p.numel() for p in meta_model(config).parameters())
    assert shape.mean_work * shape.layers / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_of_families(name: str) -> None:
    config = FAMILIES[name]()
    model = meta_model(config)
    shape = footprint(config, torch.float32).shape
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula_of_a_llama_layer_is_what_its_code_allocates(dtype: torch.dtype) -> None:
    known = footprint(LlamaConfig(num_hidden_layers=4), dtype)
    formula, traced = memory_use(known.shape, element_bytes=dtype.itemsize), known.layers
    for name in (
        "layer",
        "layer_kv",
        "layer_input",
        "kv",
        "dkv",
        "message",
        "chunk",
        "weight_operands",
        "weight_block",
    ):
        assert getattr(traced, name) == pytest.approx(getattr(formula, name), rel=0.01), name
    assert traced.backward.token == pytest.approx(formula.backward.token, rel=0.01)
    assert traced.backward.context == pytest.approx(formula.backward.context, rel=0.01)


def test_layers_of_several_kinds_are_counted_each_and_bounded_by_the_most() -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64}
    mixed = footprint(Qwen3MoeConfig(**sizes, mlp_only_layers=[0]), torch.float32)
    experts = footprint(Qwen3MoeConfig(**sizes), torch.float32)
    first, *others = mixed.shape.layer_parameters
    assert len(set(others)) == 1
    assert first != others[0]
    assert mixed.shape.layer_parameters[1:] == experts.shape.layer_parameters[1:]
    assert mixed.layers.layer >= experts.layers.layer


def test_one_layer_is_enough() -> None:
    one, two = (footprint(LlamaConfig(num_hidden_layers=count), torch.float32) for count in (1, 2))
    assert one.shape.layers == 1
    assert one.layers == two.layers
    assert isinstance(one.layers, MemoryUse)
    assert isinstance(one.layers.backward, WorkingSet)


def test_windows_are_those_that_layers_attend_with() -> None:
    gemma = Gemma3TextConfig(num_hidden_layers=7, sliding_window=9)
    assert footprint(gemma, torch.float32).shape.windows == (9, 9, 9, 9, 9, 0, 9)
    assert footprint(Qwen2Config(num_hidden_layers=2), torch.float32).shape.windows == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be a whole number of at least 1"),
        ({"num_hidden_layers": -4}, "num_hidden_layers is -4; it must be"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be"),
        ({"num_key_value_heads": 3, "num_attention_heads": 4}, "must be a multiple of num_key_value_heads, 3"),
        ({"head_dim": -8}, "head_dim is -8; it must be"),
        ({"intermediate_size": 0}, "intermediate_size is 0; it must be"),
    ],
)
def test_impossible_sizes_are_refused_by_field(changes: dict[str, Any], message: str) -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModelError, match=f"the model configuration's .*{message}"):
        footprint(config, torch.float32)
