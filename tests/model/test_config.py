"""Configurations: what is refused by name, how layers are split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    StableLmConfig,
)

from infinipipe.model import UnsupportedModelError, load_config
from infinipipe.verify import FAMILIES, self_check
from infinipipe.verify.selfcheck import shrink


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_supported_families_pass_the_self_check(family: str) -> None:
    self_check(FAMILIES[family]())


def test_a_full_size_configuration_is_checked_in_small() -> None:
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        rope_parameters={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
    )
    self_check(config)
    small = shrink(config)
    assert small.num_attention_heads / small.num_key_value_heads == 8
    assert small.rope_parameters["original_max_position_embeddings"] == 16


def test_shrinking_keeps_every_kind_of_layer() -> None:
    small = shrink(Gemma3TextConfig(num_hidden_layers=26))
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.num_hidden_layers == len(small.layer_types)
    assert small.sliding_window < 30


def test_mixture_of_experts_passes_when_no_auxiliary_loss_is_asked_for() -> None:
    self_check(Qwen3MoeConfig(num_hidden_layers=2, num_experts=8))
    with pytest.raises(UnsupportedModelError, match="auxiliary loss"):
        self_check(MixtralConfig(output_router_logits=True))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 1e4}


def test_rotary_scaling_of_a_fixed_kind_passes() -> None:
    self_check(LlamaConfig(num_hidden_layers=2, rope_parameters=YARN))


REFUSED: list[tuple[PretrainedConfig, str]] = [
    (Gemma2Config(), "attn_logit_softcapping 50.0; soft-capping"),
    (GptOssConfig(), "s_aux"),
    (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "type 'dynamic'"),
    (GraniteConfig(embedding_multiplier=12.0), "embedding_multiplier 12.0"),
    (GraniteConfig(logits_scaling=8.0), "logits_scaling 8.0"),
    (
        GraniteConfig(residual_multiplier=0.5, attention_multiplier=0.1, embedding_multiplier=2.0),
        "embedding_multiplier",
    ),
    (Cohere2Config(), "logit_scale"),
    (LlamaConfig(attention_dropout=0.1), "attention_dropout 0.1"),
    (GPT2Config(), "resid_pdrop"),
    (PhiConfig(), "usual names"),
    (MambaConfig(), "linear_attention"),
    (StableLmConfig(), "keyword arguments"),
    (Gemma3TextConfig(use_bidirectional_attention=True), "bidirectional"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[f"{c.model_type}-{m[:12]}" for c, m in REFUSED])
def test_what_cannot_be_exact_is_refused_by_name(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        self_check(config)


def test_a_habit_outside_the_layers_is_found_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check itself catches what no list names: here, a scale between embedding and layers."""
    from transformers.models.llama.modeling_llama import LlamaModel

    plain = LlamaModel.forward

    def scaled(self: LlamaModel, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return plain(self, inputs_embeds=embeds * 3.0, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", scaled)
    with pytest.raises(UnsupportedModelError, match="the family is not supported"):
        self_check(LlamaConfig(num_hidden_layers=2))


def test_a_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no model configuration"):
        load_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="no usable Hugging Face configuration"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="no usable Hugging Face configuration"):
        load_config(tmp_path)
    LlamaConfig(num_hidden_layers=3).save_pretrained(tmp_path)
    assert load_config(tmp_path).num_hidden_layers == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 1e5}, "'vocab_size'.* expected int, got float"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 0}, ""),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"rope_parameters": "default"}, ""),
        ({"model_type": "qwen3", "layer_types": 7}, ""),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LlamaConfig(num_hidden_layers=3).to_dict() | changes))
    with pytest.raises(
        ValueError, match=f"config.json holds no usable Hugging Face configuration: .*{message}"
    ) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)
