"""The shape of a decoder-only language model: all that planning needs to know of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


class CostError(ValueError):
    """A model, cost file or hardware description that cannot be used; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only language model.

    Attributes:
        layers: decoder layers.
        hidden: hidden size ``D``.
        intermediate: inner size of the MLP, gated.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: size of one head.
        vocab: vocabulary size.
        tied: whether input embedding and output head share their weight.
        windows: how many tokens a query attends to, its own included, at every layer; 0 for all. None named, all layers
            attend to all tokens.
        layer_parameters: parameters of every layer, all experts included; none named, those of a LLaMA layer of these sizes.
        layer_work: elements of the matrices that a token is multiplied with at every layer, active experts only; likewise.

    Of ``windows``, ``layer_parameters`` and ``layer_work``, more layers than are named take them in turn. Raises ``CostError`` for a
    negative window.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    windows: tuple[int, ...] = ()
    layer_parameters: tuple[int, ...] = ()
    layer_work: tuple[int, ...] = ()

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
    def _matrices(self) -> int:
        """Elements of the matrices of a LLaMA layer of these sizes."""
        return self.hidden * (2 * self.query_width + 2 * self.kv_width + 3 * self.intermediate)

    def parameters_of(self, layer: int) -> int:
        """Parameters of a layer, counted from 0."""
        named = self.layer_parameters
        return named[layer % len(named)] if named else self._matrices + 2 * self.hidden

    def work_of(self, layer: int) -> int:
        """Elements of the matrices that a token is multiplied with at a layer, counted from 0."""
        return self.layer_work[layer % len(self.layer_work)] if self.layer_work else self._matrices

    @property
    def mean_work(self) -> float:
        """Such elements of a layer, the mean over all layers."""
        return sum(map(self.work_of, range(self.layers))) / self.layers

    @property
    def embedding_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """Parameters of the model, norms and all experts included."""
        embeddings = self.embedding_weights * (1 if self.tied else 2)
        return sum(map(self.parameters_of, range(self.layers))) + self.hidden + embeddings


def even_stages(layers: int, num_stages: int) -> tuple[int, ...]:
    """``layers`` over ``num_stages`` stages as evenly as possible; the first and last get the fewer. Raises ``CostError``."""
    if num_stages < 1:
        raise CostError(f"the number of stages is {num_stages}; it must be at least 1")
    if num_stages > layers:
        raise CostError(f"{num_stages} stages are more than the model's {layers} layers; use at most {layers} stages")
    base, extra = divmod(layers, num_stages)
    first = (num_stages - extra) // 2
    return tuple(base + (first <= stage < first + extra) for stage in range(num_stages))
