"""Small random models of several families, for exactness checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

_SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "pad_token_id": None,
}


def llama(**changes: Any) -> PretrainedConfig:
    return LlamaConfig(**_SMALL | changes)


def qwen2(**changes: Any) -> PretrainedConfig:
    return Qwen2Config(**_SMALL | {"tie_word_embeddings": True} | changes)


def qwen3(**changes: Any) -> PretrainedConfig:
    return Qwen3Config(**_SMALL | {"head_dim": 16} | changes)


def mistral(**changes: Any) -> PretrainedConfig:
    return MistralConfig(**_SMALL | {"sliding_window": 13, "head_dim": 8} | changes)


def gemma3(**changes: Any) -> PretrainedConfig:
    settings = {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 17,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    }
    return Gemma3TextConfig(**_SMALL | settings | changes)


FAMILIES: Mapping[str, Callable[..., PretrainedConfig]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma3": gemma3,
}
"""Configurations of tiny models by family; keyword arguments change fields of the configuration."""
