"""What the cost model reads of windows in a configuration against what the layers of the model pass to attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    MinistralConfig,
    MistralConfig,
    Olmo3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from infinipipe.cost import ModelShape
from infinipipe.profile.workers import with_layers
from infinipipe.runtime.footprint import footprint
from infinipipe.verify.families import FAMILIES

SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}
TYPES = ["full_attention", *["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 2]
CASES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "mistral": (MistralConfig, {"sliding_window": 9}),
    "mistral-full": (MistralConfig, {"sliding_window": None}),
    "starcoder2": (Starcoder2Config, {"sliding_window": 9}),
    "ministral": (MinistralConfig, {"sliding_window": 9, "layer_types": TYPES}),
    "qwen2-off": (Qwen2Config, {"sliding_window": 9, "max_window_layers": 3}),
    "qwen2-unsaid": (Qwen2Config, {}),
    "qwen2-on": (Qwen2Config, {"sliding_window": 9, "max_window_layers": 3, "use_sliding_window": True}),
    "qwen3-on": (Qwen3Config, {"sliding_window": 9, "max_window_layers": 5, "use_sliding_window": True}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {"sliding_window": 9, "use_sliding_window": True, "num_experts": 2, "num_experts_per_tok": 1},
    ),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 9}),
    "gemma3-pattern": (Gemma3TextConfig, {"sliding_window": 9, "sliding_window_pattern": 3}),
    "gemma3-types": (Gemma3TextConfig, {"sliding_window": 9, "layer_types": TYPES}),
    "olmo3": (Olmo3Config, {"sliding_window": 9, "layer_types": TYPES}),
    "smollm3": (SmolLM3Config, {"sliding_window": 9, "layer_types": TYPES, "use_sliding_window": False}),
}


def used_windows(config: PretrainedConfig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The windows that the layers pass to attention; 0 for none."""
    windows: list[int] = []

    def attention(
        module: nn.Module, query: Tensor, *rest: Any, sliding_window: int | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        windows.append(sliding_window or 0)
        return query.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "recording", attention)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="recording")
    model(torch.arange(12).unsqueeze(0))
    return windows


def assert_windows(shape: ModelShape, expected: list[int]) -> None:
    assert [shape.layer_window(layer) for layer in range(shape.layers)] == expected


@pytest.mark.parametrize("name", CASES)
def test_files_and_models_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, fields = CASES[name]
    config = kind(**SMALL | fields)
    expected = used_windows(config, monkeypatch)
    assert len(expected) == 7
    assert_windows(footprint(config, torch.float32).shape, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_agree_at_any_number_of_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_layers(FAMILIES[name](), 7)
    assert_windows(footprint(config, torch.float32).shape, used_windows(config, monkeypatch))
