"""The model that a run trains: its configuration as the settings describe it, and where its weights come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from infinipipe.data import largest_id
from infinipipe.model import (
    Checkpoint,
    HeadDiffersError,
    changed_config,
    check_supported,
    describe_changes,
    load_config,
    text_config,
)
from infinipipe.settings import SettingError
from infinipipe.train.settings import ModelSettings, Settings

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer asks of a model.

    Attributes:
        size: entries of an embedding that has a row for every id.
        special: the tokenizer's ids under the names that a configuration has for them.
    """

    size: int
    special: Mapping[str, int | None] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
        return cls(largest_id(tokenizer) + 1, {name: getattr(tokenizer, name) for name in _TOKENS})


@dataclass(frozen=True)
class StartModel:
    """What a run starts from.

    Attributes:
        config: of the model that trains.
        export_dtype: what its weights are written in.
        report: lines for the log: what the settings change, where weights come from, what is to be borne in mind.
    """

    config: PretrainedConfig
    export_dtype: torch.dtype
    report: tuple[str, ...] = ()


def model_config(
    settings: ModelSettings, vocab_size: int, special: Mapping[str, int | None] | None = None
) -> PretrainedConfig:
    """The Hugging Face configuration; a new model gets its vocabulary and the ids of special tokens from the tokenizer's.

    Raises ``ValueError`` for a configuration that does not exist, cannot be, or is not supported.
    """
    if settings.path:
        config = _changed(load_config(settings.path), _spelled_out(settings.path), settings)
    else:
        config = _new_config(settings.config, Vocabulary(vocab_size, special or {}))
    check_supported(config)
    return config


def _new_config(fields: Mapping[str, Any], vocabulary: Vocabulary) -> PretrainedConfig:
    kind = fields["model_type"]
    changes = {name: value for name, value in fields.items() if name != "model_type"}
    try:
        default = text_config(AutoConfig.for_model(kind))
    except Exception as error:  # whatever a family's class makes of itself
        raise SettingError(f"model.config cannot be used: {' '.join(str(error).split())}") from None
    known = default.to_dict()
    special = {name: value for name, value in vocabulary.special.items() if name in known}
    config = _changed_by({"vocab_size": vocabulary.size} | special | changes, default, {})
    if config.vocab_size < vocabulary.size:
        raise SettingError(
            f"model.config.vocab_size is {config.vocab_size}, but the tokenizer's largest id is {vocabulary.size - 1}; make it at "
            f"least {vocabulary.size}"
        )
    return config


def _spelled_out(path: str) -> dict[str, Any]:
    """The fields of the language model that a configuration file gives."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    fields: dict[str, Any] = json.loads(file.read_text())
    nested = fields.get("text_config")
    return nested if isinstance(nested, dict) else fields


def _changed(config: PretrainedConfig, given: Mapping[str, Any], settings: ModelSettings) -> PretrainedConfig:
    """A file's configuration with the settings' changes; those of a multi-modal model may be in its ``text_config``."""
    changes = dict(settings.config)
    kind = changes.pop("model_type", config.model_type)
    if kind != config.model_type:
        raise SettingError(f"model.config.model_type is {kind!r}, but {settings.path} holds a {config.model_type}")
    nested = changes.pop("text_config", {})
    if not isinstance(nested, Mapping):
        raise SettingError(f"model.config.text_config must be a table of fields, not {nested!r:.40}")
    return _changed_by(changes | dict(nested), config, given) if changes or nested else config


def _changed_by(changes: Mapping[str, Any], config: PretrainedConfig, given: Mapping[str, Any]) -> PretrainedConfig:
    try:
        return changed_config(config, given, changes)
    except SettingError as error:
        raise SettingError(f"model.config.{error}") from None
    except Exception as error:  # whatever a family's class makes of a value that it does not expect
        raise SettingError(f"model.config cannot be used: {' '.join(str(error).split())}") from None


def open_model(settings: Settings, vocabulary: Vocabulary | None = None) -> StartModel:
    """The model that the settings describe, its checkpoint understood, every tensor of it accounted for.

    ``vocabulary`` is needed for a model without path. A checkpoint whose head differs from the embedding though its
    configuration ties them is trained untied, as transformers does, and that is said. Raises ``ValueError``.
    """
    model = settings.model
    vocabulary = vocabulary or Vocabulary(0)
    config = model_config(model, vocabulary.size, vocabulary.special)
    report: list[str] = []
    if model.path and (changes := describe_changes(load_config(model.path), config)):
        report.append(f"model.config changes {model.path}: {', '.join(changes)}")
    dtype = torch.float32
    if model.weights == "load":
        try:
            checkpoint = open_checkpoint(model, config)
        except HeadDiffersError as error:
            if "tie_word_embeddings" in model.config:
                raise
            config.tie_word_embeddings = False
            checkpoint = open_checkpoint(model, config)
            warning = f"warning: {error.reason}; they are trained apart, and the exported configuration says so"
            report.append(warning)
        report.append(checkpoint.describe())
        dtype = checkpoint.dtype
    chosen = settings.train.export_dtype
    if too_long := _too_long(settings, config):
        report.append(too_long)
    return StartModel(config, dtype if chosen == "source" else getattr(torch, chosen), tuple(report))


def open_checkpoint(settings: ModelSettings, config: PretrainedConfig) -> Checkpoint:
    """The checkpoint of the settings, understood for a model of ``config``. Raises ``ValueError``."""
    return Checkpoint(settings.path, config, ignore=settings.ignore)


def _too_long(settings: Settings, config: PretrainedConfig) -> str | None:
    """A warning if sequences may have more positions than the configuration names, unless it is a new model's default."""
    positions, length = getattr(config, "max_position_embeddings", None), settings.data.max_length
    is_default = not settings.model.path and "max_position_embeddings" not in settings.model.config
    if not positions or length <= positions or is_default:
        return None
    return (
        f"warning: data.max_length is {length}, but the model's configuration is for sequences of up to {positions} tokens "
        "(max_position_embeddings); longer ones are trained on at positions that it may never have seen, and the exported "
        "configuration will cover the longest"
    )
