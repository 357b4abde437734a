"""Admission of a model architecture: shrunk to a few tiny layers, it must agree between stages and the plain model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from infinipipe.cost import even_stages
from infinipipe.model import UnsupportedModelError, check_supported
from infinipipe.plan import Chunk, Pipeline, Plan, build_replica, cut, whole
from infinipipe.verify.cases import Case, run_locally

TOLERANCE = 1e-9
"""The largest relative gradient error in float64 that passes."""

_WINDOW = 7
_POSITIONS = 16
_FIXED = {
    "vocab_size": 64,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "quantization_config": None,
}
_AT_MOST = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def self_check(config: PretrainedConfig) -> None:
    """Refuse an architecture whose stages would not compute what the plain model computes.

    Runs a few seconds on one core in float64: two stages, a sequence in four slices, packed neighbours longer than the window.
    Raises ``UnsupportedModelError`` saying what differs.
    """
    check_supported(config)
    try:
        small = shrink(config)
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise UnsupportedModelError(f"{config.model_type} has an unusual configuration: {error}") from error
    num_stages = min(2, small.num_hidden_layers)
    lengths = (29, 2 * _POSITIONS + 9, 3)
    first, *middle, last = cut(1, lengths[1], [7, 22, 30])
    chunks = (Chunk((first,)), *(Chunk((piece,)) for piece in middle), Chunk((last, *whole(lengths, [0, 2]))))
    layers = even_stages(small.num_hidden_layers, num_stages)
    recompute = [[count, 0, count // 2, count] for count in layers]
    replica = build_replica([Pipeline(chunks)], num_stages, recompute=recompute)
    case = Case(small, Plan(layers, lengths, (replica,)), seed=1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        outcome = run_locally(case)
    except UnsupportedModelError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise UnsupportedModelError(f"{config.model_type} cannot run in slices: {reason}") from error
    finally:
        torch.set_num_threads(threads)
    difference = max(outcome.gradient_error, outcome.loss_difference)
    if not difference < TOLERANCE:
        raise UnsupportedModelError(
            f"{config.model_type} computes something in slices that the plain model does not: a tiny model of its "
            f"architecture differs by {difference:.1e}, more than {TOLERANCE:.0e}; the family is not supported"
        )


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A tiny model of the same architecture: every kind of layer, the head ratio and all features kept."""
    small = copy.deepcopy(config)
    changes: dict[str, Any] = {key: value for key, value in _FIXED.items() if hasattr(small, key)}
    changes |= {key: min(getattr(small, key), most) for key, most in _AT_MOST.items() if getattr(small, key, None)}
    changes |= _heads(small)
    num_layers = _layers_that_show_every_kind(config)
    changes["num_hidden_layers"] = num_layers
    if getattr(small, "layer_types", None):
        changes["layer_types"] = list(small.layer_types[:num_layers])
    if getattr(small, "sliding_window", None):
        changes["sliding_window"] = _WINDOW
    changes["max_position_embeddings"] = _POSITIONS
    for key, value in changes.items():
        setattr(small, key, value)
    small._experts_implementation = "eager"
    for field in ("rope_parameters", "rope_scaling"):
        _shrink_rotary(getattr(small, field, None), small)
    return small


def _heads(config: PretrainedConfig) -> dict[str, int]:
    """Heads in the same ratio; a head size that is not hidden size / heads stays independent of it."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    small_kv = min(2, kv_heads)
    small_heads = small_kv * max(1, heads // kv_heads)
    changes = {"num_attention_heads": small_heads, "hidden_size": 8 * small_heads}
    if getattr(config, "num_key_value_heads", None):
        changes["num_key_value_heads"] = small_kv
    if getattr(config, "head_dim", None):
        changes["head_dim"] = 8
        if config.head_dim * heads != config.hidden_size:
            changes["hidden_size"] = 8 * small_heads + 8
    return changes


def _shrink_rotary(parameters: Any, config: PretrainedConfig) -> None:
    """Move the position thresholds of rotary scaling to where a sequence of the check passes them."""
    if not isinstance(parameters, dict):
        return
    if parameters.get("original_max_position_embeddings"):
        parameters["original_max_position_embeddings"] = _POSITIONS
        config.max_position_embeddings = int(_POSITIONS * parameters.get("factor", 1))
    for value in parameters.values():
        _shrink_rotary(value, config)


def _layers_that_show_every_kind(config: PretrainedConfig) -> int:
    """How many layers, from the first, until every kind of layer has come; at least two if there are as many."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        raise UnsupportedModelError(f"{config.model_type} has no layers of the usual name")
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    kinds = [
        (kind, tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()))
        for kind, layer in zip(types, layers, strict=False)
    ]
    last_new = max(kinds.index(kind) for kind in set(kinds)) if kinds else 0
    return min(len(kinds), max(2, last_new + 1))
