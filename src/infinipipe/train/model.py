"""The model's configuration as the settings describe it."""

from __future__ import annotations

from transformers import AutoConfig, PretrainedConfig

from infinipipe.model import check_supported, load_config, text_config
from infinipipe.settings import SettingError
from infinipipe.train.settings import ModelSettings


def model_config(settings: ModelSettings, vocab_size: int) -> PretrainedConfig:
    """The Hugging Face configuration; ``vocab_size`` is the tokenizer's.

    Raises ``ValueError`` for a configuration that does not exist, cannot be, or is not supported.
    """
    fields = dict(settings.config)
    kind = fields.pop("model_type", None)
    if settings.path:
        config = load_config(settings.path)
        if kind not in (None, config.model_type):
            raise SettingError(f"model.config.model_type is {kind!r}, but {settings.path} holds a {config.model_type}")
        fields = config.to_dict() | fields
        kind = config.model_type
    else:
        fields.setdefault("vocab_size", vocab_size)
    try:
        known = AutoConfig.for_model(kind).to_dict()
        unknown = sorted(set(settings.config) - {"model_type"} - set(known))
        if unknown:
            raise SettingError(f"model.config.{unknown[0]} is no field of a {kind} configuration")
        fields.pop("model_type", None)
        config = text_config(AutoConfig.for_model(kind, **fields))
    except SettingError:
        raise
    except Exception as error:  # whatever a family's class makes of a value that it does not expect
        raise SettingError(f"model.config cannot be used: {' '.join(str(error).split())}") from None
    if config.vocab_size < vocab_size:
        raise SettingError(
            f"model.config.vocab_size is {config.vocab_size}, but the tokenizer has {vocab_size} entries; raise it"
        )
    check_supported(config)
    return config
