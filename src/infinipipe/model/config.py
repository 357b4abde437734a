"""Model configurations: loading them, and refusing by name what cannot be computed exactly in slices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

_DROPOUTS = (
    "attention_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout",
    "embedding_dropout",
)
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "logit_scale")
_CALL_DEPENDENT_ROTARY = ("dynamic", "longrope")


class UnsupportedModelError(ValueError):
    """A model with a feature that the runtime cannot compute exactly; the message names the feature."""


def load_config(source: str | Path) -> PretrainedConfig:
    """The configuration in a directory or JSON file of Hugging Face form.

    Raises ``ValueError`` if there is none, or none that can be used.
    """
    path = Path(source)
    if not path.exists():
        raise ValueError(
            f"there is no model configuration at {str(source)!r}; give a directory with config.json or such a file"
        )
    try:
        return text_config(AutoConfig.from_pretrained(path, local_files_only=True))
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a family's class makes of a field that it does not expect
        message = " ".join(" ".join(str(error).strip().split("\n")[:2]).split())
        raise ValueError(f"{path} holds no usable Hugging Face configuration: {message}") from None


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The language model's part of ``config``; the configuration itself for a pure language model."""
    text = config.get_text_config()
    if getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder-decoder model; only decoder-only models are supported"
        )
    return text


def check_supported(config: PretrainedConfig) -> None:
    """Refuse a configuration with a feature that slices cannot compute exactly. Raises ``UnsupportedModelError``."""
    name = config.model_type
    for field in _DROPOUTS:
        if (getattr(config, field, None) or 0) > 0:
            raise UnsupportedModelError(
                f"{name} has {field} {getattr(config, field)}; dropout is not supported, set it to 0 in the model's config"
            )
    for field in _SOFT_CAPS:
        if getattr(config, field, None):
            raise UnsupportedModelError(f"{name} has {field} {getattr(config, field)}; soft-capping is not supported")
    for field in _MULTIPLIERS:
        if getattr(config, field, None) not in (None, 1, 1.0):
            raise UnsupportedModelError(
                f"{name} has {field} {getattr(config, field)}; multipliers outside the layers are not supported"
            )
    for kind in _rotary_types(config):
        if kind in _CALL_DEPENDENT_ROTARY:
            raise UnsupportedModelError(
                f"{name} has rotary embeddings of type {kind!r}, which depend on the longest position of a call; "
                "use a fixed type such as 'yarn' or 'linear'"
            )
    if getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            f"{name} has output_router_logits set; the router's auxiliary loss is not supported, set it to false"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{name} has use_bidirectional_attention set; only causal attention is supported")
    types = set(getattr(config, "layer_types", None) or ())
    unknown = types - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(sorted(unknown))}; full_attention and sliding_attention are supported"
        )


def _rotary_types(config: PretrainedConfig) -> Iterator[str]:
    """Every rotary type that a configuration names, one for all layers or one for each layer type."""
    for field in ("rope_parameters", "rope_scaling"):
        yield from _types_in(getattr(config, field, None))


def _types_in(parameters: Any) -> Iterator[str]:
    if not isinstance(parameters, dict):
        return
    for key in ("rope_type", "type"):
        if isinstance(parameters.get(key), str):
            yield parameters[key]
    for value in parameters.values():
        yield from _types_in(value)
