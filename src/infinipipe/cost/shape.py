"""The shape of a decoder-only language model: all that planning needs to know of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinipipe.files import parse_json


class CostError(ValueError):
    """A model, cost file or hardware description that cannot be used; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only language model.

    Attributes:
        layers: decoder layers.
        hidden: hidden size ``D``.
        intermediate: inner size of the MLP.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: size of one head.
        vocab: vocabulary size.
        tied: whether input embedding and output head share their weight.
        gated: whether the MLP has a gate beside its up-projection.
        norms: norms over the hidden size in a layer.
        qk_norm: whether queries and keys are normalised.
        windows: how many tokens a query attends to, its own included, at every layer; 0 for all. More layers than are named
            take them in turn; none named, all layers attend to all tokens.

    Raises ``CostError`` for a negative window.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    gated: bool = True
    norms: int = 2
    qk_norm: bool = False
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.windows, default=0) < 0:
            raise CostError(f"windows is {list(self.windows)}; a window must be at least 1, or 0 for no window")

    def layer_window(self, layer: int) -> int:
        """The window of a layer, counted from 0; 0 if it attends to all tokens."""
        return self.windows[layer % len(self.windows)] if self.windows else 0

    def stage_windows(self, stage_layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The window of every layer of every stage, the stages taking that many layers in order."""
        ends = itertools.accumulate(stage_layers)
        return tuple(
            tuple(self.layer_window(layer) for layer in range(end - count, end))
            for end, count in zip(ends, stage_layers, strict=True)
        )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """``D_kv``: width of the keys, and of the values, of a token."""
        return self.kv_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Parameters of the matrices of a layer."""
        attention = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        return attention + self.hidden * self.intermediate * (3 if self.gated else 2)

    @property
    def embedding_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """Parameters of the model, norms included."""
        embeddings = self.embedding_weights * (1 if self.tied else 2)
        return self.layers * (self.layer_weights + self.norms * self.hidden) + self.hidden + embeddings

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a Hugging Face configuration (``config.json`` as a dictionary). Raises ``CostError``."""
        text = config.get("text_config")
        config = text if isinstance(text, Mapping) and text else config
        kind = str(config.get("model_type", ""))
        layers, hidden = _count(config, "num_hidden_layers"), _count(config, "hidden_size")
        heads = _count(config, "num_attention_heads")
        kv_heads = _count(config, "num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise CostError(
                f"the model configuration's num_attention_heads is {heads}; it must be a multiple of "
                f"num_key_value_heads, {kv_heads}"
            )
        activation = str(config.get("hidden_act", config.get("hidden_activation", "silu")))
        return cls(
            layers=layers,
            hidden=hidden,
            intermediate=_count(config, "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_count(config, "head_dim", default=hidden // heads),
            vocab=_count(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            gated="silu" in activation or "swish" in activation or kind.startswith("gemma"),
            norms=4 if kind.startswith(("gemma2", "gemma3")) else 2,
            qk_norm=kind.startswith(("qwen3", "gemma3", "olmo2")),
            windows=_windows(config, kind, layers),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> ModelShape:
        """Read ``config.json``, given itself or by its folder. Raises ``CostError``."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = parse_json(path.read_text())
        except OSError as error:
            raise CostError(f"cannot read the model configuration {path}: {error.strerror}") from None
        except ValueError:
            raise CostError(f"the model configuration {path} is not JSON") from None
        if not isinstance(config, dict):
            raise CostError(f"the model configuration {path} is not a JSON object")
        return cls.from_config(config)


_EVERY_LAYER = ("mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2")
"""Families of which every layer has the configuration's window, whatever else it says."""
_OPTED_IN = ("qwen", "smollm")
"""Families whose window counts only with ``use_sliding_window``."""
_GEMMA3_PATTERN = 6


def _count(config: Mapping[str, Any], name: str, *, default: int | None = None, least: int = 1) -> int:
    """The whole number that a configuration gives under that name, else the default. Raises ``CostError``."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < least:
        given = "missing" if value is None else f"{value!r:.40}"
        raise CostError(f"the model configuration's {name} is {given}; it must be a whole number of at least {least}")
    return value


def _windows(config: Mapping[str, Any], kind: str, count: int) -> tuple[int, ...]:
    """The window of every layer; empty if there is none.

    Older configurations imply layer types: every ``sliding_window_pattern``-th layer is full, or the first
    ``max_window_layers`` are.
    """
    if not config.get("sliding_window") or not config.get("use_sliding_window", not kind.startswith(_OPTED_IN)):
        return ()
    window = _count(config, "sliding_window")
    pattern = config.get("sliding_window_pattern", _GEMMA3_PATTERN if kind.startswith("gemma3") else None)
    if kind in _EVERY_LAYER:
        local = [True] * count
    elif types := config.get("layer_types"):
        if not isinstance(types, list | tuple) or len(types) < count:
            raise CostError(f"the model configuration's layer_types is no list of {count} types, one for every layer")
        local = [name == "sliding_attention" for name in types[:count]]
    elif isinstance(pattern, int) and pattern > 0:
        local = [(layer + 1) % pattern > 0 for layer in range(count)]
    else:
        first = _count(config, "max_window_layers", default=0, least=0)
        local = [layer >= first for layer in range(count)]
    return tuple(window if limited else 0 for limited in local) if any(local) else ()


def even_stages(layers: int, num_stages: int) -> tuple[int, ...]:
    """``layers`` over ``num_stages`` stages as evenly as possible; the first and last get the fewer. Raises ``CostError``."""
    if num_stages < 1:
        raise CostError(f"the number of stages is {num_stages}; it must be at least 1")
    if num_stages > layers:
        raise CostError(f"{num_stages} stages are more than the model's {layers} layers; use at most {layers} stages")
    base, extra = divmod(layers, num_stages)
    first = (num_stages - extra) // 2
    return tuple(base + (first <= stage < first + extra) for stage in range(num_stages))
