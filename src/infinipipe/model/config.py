"""Model configurations: loading them, and refusing by name what cannot be computed exactly in slices."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from infinipipe.settings import SettingError

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
    """The configuration of the language model in a directory or JSON file of Hugging Face form.

    Raises ``ValueError`` if there is none, or none that can be used.
    """
    path = Path(source)
    if not path.exists():
        raise ValueError(
            f"there is no model configuration at {str(source)!r}; give a directory with config.json or such a file"
        )
    try:
        config = text_config(AutoConfig.from_pretrained(path, local_files_only=True))
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a family's class makes of a field that it does not expect
        message = " ".join(" ".join(str(error).strip().split("\n")[:2]).split())
        raise ValueError(f"{path} holds no usable Hugging Face configuration: {message}") from None
    # How the file stores its weights; those of the model that trains, and of what is written, are plain numbers.
    vars(config).pop("quantization_config", None)
    return config


_TEXT_MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
}
"""Language models of multi-modal families that have no causal class of their own, and the family, with the fields, that
computes the same for text, whose three rotary positions are equal. A test compares their logits."""
_IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The language model's part of ``config``; the configuration itself for a pure language model.

    Whether embedding and head are one weight is what the whole model says. Raises ``UnsupportedModelError`` for a model
    that is no decoder.
    """
    text = config.get_text_config()
    if getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder-decoder model; only decoder-only models are supported"
        )
    if text is config:
        return text
    tied = bool(getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False)))
    if text.model_type in _TEXT_MODELS:
        kind, fixed = _TEXT_MODELS[text.model_type]
        known = AutoConfig.for_model(kind).to_dict().keys() - _OF_A_FILE - {"model_type"}
        fields = {name: value for name, value in text.to_dict().items() if name in known}
        rotary = {key: value for key, value in fields["rope_parameters"].items() if key not in _IMAGE_POSITIONS}
        text = AutoConfig.for_model(kind, **fields | {"rope_parameters": rotary} | fixed)
    text.tie_word_embeddings = tied
    return text


_OF_A_FILE = {"transformers_version", "dtype", "torch_dtype", "architectures", "_name_or_path"}
"""Fields that say something about a file, not about the model."""
_OLD_ROTARY = ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
_WHATEVER_THE_TYPE = ("rope_theta", "partial_rotary_factor")
"""Rotary parameters that mean the same for every ``rope_type``."""
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def changed_config(config: PretrainedConfig, given: Mapping[str, Any], changes: Mapping[str, Any]) -> PretrainedConfig:
    """``config`` with ``changes`` of its fields, tables merged field by field.

    Rotary parameters may be spelled ``rope_parameters``, or as before it ``rope_scaling`` and ``rope_theta``. ``given`` are
    the fields that the file spells out: the others follow from what they follow from, the layers' types from the number of
    layers, say. Raises ``SettingError`` naming a field that there is none of, and whatever a family's class raises.
    """
    kind = config.model_type
    known = config.to_dict()
    names = {type(config).attribute_map.get(name, name): name for name in changes}
    rotary = {new: changes[old] for new, old in names.items() if new in ("rope_parameters", *_OLD_ROTARY)}
    plain = {new: changes[old] for new, old in names.items() if new not in rotary}
    has_rotary = "rope_parameters" in known
    for new, old in names.items():
        if new in ("dtype", "torch_dtype"):
            raise SettingError(
                f"{old} decides nothing here; set model.dtype to compute in it, train.export_dtype to write it"
            )
        if new not in (known.keys() if new not in rotary else known.keys() | (_OLD_ROTARY if has_rotary else ())):
            raise SettingError(f"{old} is no field of a {kind} configuration")
    fields = _given_fields(config, given)
    if plain.get("num_hidden_layers", math.inf) < config.num_hidden_layers and "layer_types" not in plain:
        fields["layer_types"] = (getattr(config, "layer_types", None) or [])[: plain["num_hidden_layers"]] or None
        fields = {name: value for name, value in fields.items() if (name, value) != ("layer_types", None)}
    fields = {name: _merged(fields.get(name), value) for name, value in (fields | plain).items()}
    changed = AutoConfig.for_model(kind, **copy.deepcopy(fields))
    if rotary:
        parameters = _changed_rotary(changed, rotary)
        changed = AutoConfig.for_model(kind, **copy.deepcopy(fields | {"rope_parameters": parameters}))
    return changed


def _given_fields(config: PretrainedConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``config`` that make it anew: those that its file gives, if these do, else all."""
    everything = {name: value for name, value in config.to_dict().items() if name not in _OF_A_FILE | {"model_type"}}
    always = {"rope_parameters", "tie_word_embeddings"}
    spelled = {name: value for name, value in everything.items() if name in given or name in always}
    again = AutoConfig.for_model(config.model_type, **copy.deepcopy(spelled)).to_dict()
    return spelled if all(again.get(name) == value for name, value in everything.items()) else everything


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def _changed_rotary(config: PretrainedConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters of ``config`` with changes in any spelling. Raises ``SettingError``."""
    current: dict[str, Any] = copy.deepcopy(config.rope_parameters)
    nested = bool(config.nested_rope_parameter_keys(current))
    steps: list[tuple[str, dict[str, Any]]] = []
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in changes:
            steps.append((_GLOBAL, {name: changes[name]}))
    if "rope_local_base_freq" in changes:
        if not nested:
            raise SettingError(f"rope_local_base_freq is no field of a {config.model_type} configuration")
        steps.append((_LOCAL, {"rope_theta": changes["rope_local_base_freq"]}))
    for name in ("rope_scaling", "rope_parameters"):
        if name not in changes:
            continue
        value = changes[name]
        value = {"rope_type": "default"} if value is None or value == {} else value
        if not isinstance(value, Mapping):
            raise SettingError(f"{name} must be a table of rotary parameters, not {value!r:.40}")
        if not nested or name == "rope_scaling":
            steps.append((_GLOBAL, dict(value)))
        elif unknown := sorted(value.keys() - current.keys()):
            raise SettingError(
                f"{name}.{unknown[0]} is none of the layer types of a {config.model_type} configuration, each of which has "
                f"its own rotary parameters: {', '.join(sorted(current))}"
            )
        else:
            steps += [(kind, dict(table or {})) for kind, table in value.items()]
    for kind, table in steps:
        if nested:
            current[kind] = _merged_rotary(current.get(kind) or {}, table)
        else:
            current = _merged_rotary(current, table)
    return current


def _merged_rotary(current: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """One table of rotary parameters with changes. Another ``rope_type`` starts without the parameters of the old one."""
    changes = {("rope_type" if name == "type" else name): value for name, value in changes.items()}
    known = RopeParameters.__annotations__.keys() | current.keys()
    if unknown := sorted(changes.keys() - known):
        raise SettingError(f"rope_parameters.{unknown[0]} is no rotary parameter; known are {', '.join(sorted(known))}")
    kind = changes.get("rope_type", "default")
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        kinds = ", ".join(["default", *sorted(ROPE_INIT_FUNCTIONS)])
        raise SettingError(f"rope_parameters.rope_type is {kind!r}, which is none of {kinds}")
    if changes.get("rope_type", current.get("rope_type")) != current.get("rope_type"):
        current = {name: value for name, value in current.items() if name in _WHATEVER_THE_TYPE}
    return {**current, **changes}


def model_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a configuration's fields that describe the model, as they come back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(dict(fields)))
    return {name: value for name, value in found.items() if name not in _OF_A_FILE}


def describe_changes(before: PretrainedConfig, after: PretrainedConfig) -> list[str]:
    """Every field that differs, with both values, such as ``rope_parameters.factor from none to 4.0``."""
    old, new = (dict(_flat(model_fields(config.to_dict()))) for config in (before, after))
    return [
        f"{name} from {_shown(old.get(name))} to {_shown(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"a list of {len(value)}"
    return "none" if value is None else str(value)


_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary types whose frequencies depend on ``max_position_embeddings``."""


def covering(config: PretrainedConfig, length: int) -> PretrainedConfig:
    """``config`` with as many positions as sequences of ``length`` tokens have, where that changes nothing else.

    YaRN's positions become at least its factor times the original ones, from which some readers compute the factor.
    """
    covered = copy.deepcopy(config)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or any(kind in _LENGTH_DEPENDENT for kind in _rotary_types(config)):
        return covered
    for table in _rotary_tables(config):
        if table.get("rope_type") == "yarn":
            positions = max(positions, int(table["factor"] * table["original_max_position_embeddings"]))
    covered.max_position_embeddings = max(positions, length)
    return covered


def hub_fields(config: PretrainedConfig, architecture: str, dtype: str) -> dict[str, Any]:
    """What ``config.json`` holds, in the spellings of transformers 4 and 5.

    Every field of the family is spelled out, since defaults differ between versions; of the fields that all models have, those
    that are not the default.
    """
    usual = PretrainedConfig().to_dict()
    given = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    fields = {name: value for name, value in given.items() if name not in usual or value != usual[name]}
    # Other versions know some fields under another name only, the number of experts, say.
    aliases = type(config).attribute_map
    fields |= {other: fields[name] for other, name in aliases.items() if name in fields}
    rotary = fields.get("rope_parameters")
    if rotary:
        nested = config.nested_rope_parameter_keys(rotary)
        whole = rotary.get(_GLOBAL) if nested else rotary
        fields |= _old_rotary(whole or {})
        if nested and rotary.get(_LOCAL):
            fields["rope_local_base_freq"] = rotary[_LOCAL]["rope_theta"]
    fields |= {"architectures": [architecture], "dtype": dtype, "torch_dtype": dtype}
    fields["model_type"] = config.model_type
    return dict(sorted(fields.items()))


def _old_rotary(table: Mapping[str, Any]) -> dict[str, Any]:
    """One table of rotary parameters as transformers 4 spells it."""
    scaling = {name: value for name, value in table.items() if name not in _WHATEVER_THE_TYPE and value is not None}
    return {
        **{name: table[name] for name in _WHATEVER_THE_TYPE if name in table},
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
    }


_COUNTS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_OPTIONAL_COUNTS = ("intermediate_size", "num_key_value_heads", "head_dim", "sliding_window")


def check_sizes(config: PretrainedConfig) -> None:
    """Refuse sizes of which no model can be built, by the configuration's field. Raises ``UnsupportedModelError``."""
    for name in (*_COUNTS, *_OPTIONAL_COUNTS):
        value = getattr(config, name, None)
        if value is None and name in _OPTIONAL_COUNTS:
            continue
        if type(value) is not int or value < 1:
            given = "missing" if value is None else f"{value!r:.40}"
            raise UnsupportedModelError(
                f"the model configuration's {name} is {given}; it must be a whole number of at least 1"
            )
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or 1
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"the model configuration's num_attention_heads is {heads}; it must be a multiple of num_key_value_heads, {kv_heads}"
        )
    layers, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    if types is not None and (not isinstance(types, list | tuple) or len(types) != layers):
        raise UnsupportedModelError(
            f"the model configuration's layer_types is no list of {layers} types, one for every layer"
        )


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
    for table in _rotary_tables(config):
        yield from (table[key] for key in ("rope_type", "type") if isinstance(table.get(key), str))


def _rotary_tables(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """The tables of rotary parameters: one for all layers or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict):
        yield parameters
        yield from (table for table in parameters.values() if isinstance(table, dict))
