"""Small models of many families as they are on the hub: random weights, written by transformers in each family's own layout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCABULARY = 320
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
_IMAGE_ROTARY = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}
_SHARP = re.compile(r"(q|k|qkv)_proj\.weight$")
_EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIGLIP |= {"image_size": 28, "patch_size": 14}
_QWEN_EYE = {"hidden_size": 16, "depth": 1, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


@dataclass(frozen=True)
class Family:
    """How a family is made small.

    Attributes:
        make: its configuration.
        dtype: of the stored weights.
        overrides: what a run changes of the configuration.
        sharpness: of attention: deviation of the weights of queries and keys, so large that logits depend on positions, or a
            wrong rotary frequency would not show.
    """

    make: Callable[[], PretrainedConfig]
    dtype: torch.dtype = torch.float32
    overrides: dict[str, Any] = field(default_factory=dict)
    sharpness: float = 0.45

    def write(self, folder: Path) -> None:
        """Write a model of random weights in the family's layout, in several files, with generation settings."""
        torch.manual_seed(len(folder.name))
        config = self.make()
        model = model_class(config).from_config(config)
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, std=self.sharpness if _SHARP.search(name) else 0.15)
        model.to(self.dtype).save_pretrained(folder, max_shard_size="60KB")
        generation = {"eos_token_id": [0, 5], "temperature": 0.7, "do_sample": True}
        (folder / "generation_config.json").write_text(json.dumps(generation))


def model_class(config: PretrainedConfig) -> Any:
    """The class that loads a checkpoint of a configuration, with its vision part if it has one."""
    is_text = config.get_text_config() is config
    return AutoModelForCausalLM if is_text else hf.AutoModelForImageTextToText


def load(folder: Path) -> PreTrainedModel:
    """A checkpoint as transformers loads it, in float32."""
    model: PreTrainedModel = model_class(hf.AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model


def _text(name: str, **fields: Any) -> Family:
    kind = getattr(hf, name)
    return Family(lambda: kind(**_TEXT | fields))


FAMILIES: Mapping[str, Family] = {
    "Llama 3 (llama3 scaling)": _text("LlamaConfig", rope_parameters=_LLAMA3),
    "Qwen3-MoE": _text("Qwen3MoeConfig", head_dim=16, norm_topk_prob=True, **_EXPERTS),
    "Gemma 3, multi-modal": Family(
        lambda: hf.Gemma3Config(
            text_config=_TEXT | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 17},
            vision_config=_SIGLIP,
            mm_tokens_per_image=4,
        )
    ),
    "Llama in bfloat16": Family(
        lambda: hf.LlamaConfig(**_TEXT, rope_parameters={"rope_type": "default", "rope_theta": 5e5}), torch.bfloat16
    ),
    "Qwen2 (tied)": _text("Qwen2Config", tie_word_embeddings=True),
    "Qwen3": _text("Qwen3Config", head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "Qwen3 extended by YaRN": Family(
        lambda: hf.Qwen3Config(**_TEXT, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        overrides={"rope_parameters": {key: value for key, value in _YARN.items() if key != "rope_theta"}},
    ),
    "Mistral (sliding window)": _text("MistralConfig", head_dim=8, sliding_window=13),
    "Mixtral": _text("MixtralConfig", num_local_experts=12, num_experts_per_tok=2),
    "Gemma 3 (text)": _text("Gemma3TextConfig", head_dim=16, query_pre_attn_scalar=16, sliding_window=17),
    # Sharp attention makes this one ill-conditioned: float32 gradients are right to 1e-4 only.
    "Gemma": Family(lambda: hf.GemmaConfig(**_TEXT, head_dim=16), sharpness=0.15),
    "Phi-3": _text("Phi3Config"),
    "OLMo 2": _text("Olmo2Config"),
    "OLMo 3 (YaRN in full layers)": Family(
        lambda: hf.Olmo3Config(
            **_TEXT,
            sliding_window=17,
            rope_parameters={"full_attention": dict(_YARN), "sliding_attention": {"rope_theta": 1e6}},
        )
    ),
    "OLMoE": _text("OlmoeConfig", num_experts=12, num_experts_per_tok=2),
    "SmolLM3": _text("SmolLM3Config"),
    "GLM-4": _text("Glm4Config", head_dim=16),
    "Starcoder 2": _text("Starcoder2Config", residual_dropout=0.0, embedding_dropout=0.0),
    "ERNIE 4.5": _text("Ernie4_5Config", head_dim=16),
    "EXAONE 4": _text("Exaone4Config", sliding_window=17, sliding_window_pattern=2),
    "Helium": _text("HeliumConfig", head_dim=8),
    "Qwen2.5-VL": Family(
        lambda: hf.Qwen2_5_VLConfig(text_config=_TEXT | {"rope_parameters": _IMAGE_ROTARY}, vision_config=_QWEN_EYE)
    ),
    "Qwen3-VL": Family(
        lambda: hf.Qwen3VLConfig(
            text_config=_TEXT | {"head_dim": 8, "rope_parameters": _IMAGE_ROTARY | {"mrope_interleaved": True}},
            vision_config=_QWEN_EYE | {"deepstack_visual_indexes": [0]},
        )
    ),
    "Qwen3-VL-MoE": Family(
        lambda: hf.Qwen3VLMoeConfig(
            text_config=_TEXT
            | _EXPERTS
            | {"head_dim": 8, "rope_parameters": _IMAGE_ROTARY | {"mrope_interleaved": True}},
            vision_config=_QWEN_EYE | {"deepstack_visual_indexes": [0]},
        )
    ),
    "Mistral Small 3 (multi-modal)": Family(
        lambda: hf.Mistral3Config(
            tie_word_embeddings=False,
            text_config=_TEXT | {"model_type": "mistral", "head_dim": 8},
            vision_config=_SIGLIP | {"model_type": "pixtral", "head_dim": 8},
        )
    ),
}
"""Families by the name that a reader knows; the first ones stand for what is most unlike the others."""
