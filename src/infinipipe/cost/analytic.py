"""The analytic cost model: time and bytes as linear functions of a chunk's features (Eq. 1-5, 9-11)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from infinipipe.cost.features import (
    Features,
    FloatArray,
    Number,
    chunk_features,
    chunks_features,
    mean_features,
    prefix_pairs,
)
from infinipipe.cost.memory import MemoryUse
from infinipipe.cost.shape import CostError, ModelShape
from infinipipe.cost.table import PILING_UP, Columns, CostTable, message_bytes, sequence_bytes
from infinipipe.plan import ONE_EACH, Chunk, Placement
from infinipipe.plan.kinds import ACTIVATIONS, WEIGHT_OPERANDS


def _refuse_negative(owner: object, *names: str) -> None:
    for name in names:
        if (value := getattr(owner, name)) < 0:
            raise CostError(f"{name} is {value}; it must be at least 0")


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Seconds of one pass, forward or backward, on one device without sequence parallelism.

    Attributes:
        pair: a layer's, per unit of ``pairs``, without a window ``(C + s)^2 - C^2`` (``a1``).
        token: a layer's, per token (``a2``).
        slice: a layer's, per slice of the chunk: what one more packed sequence costs.
        chunk: a layer's, per chunk (``b1`` over all layers).
        stage: a part's, per chunk, whatever its layers.
        embedding_token: the first part's, per token.
        embedding_chunk: the same, per chunk: in a backward, adding up the gradient of the whole embedding.
        head_token: the last part's head and loss, per token.
        head_chunk: the same, per chunk.
        context: a layer's, per unit of ``crossed``, without a window ``2 C s``, beyond ``pair``: negative where attention to
            the context, which needs no mask, is faster than causal attention.
        reach: a layer's, per token that the slice of a cut sequence attends to: moving keys, values and their gradients.
        resumed: a layer's, per chunk whose first slice has a context: its attention comes in two parts.
        short: a layer's, per token that a chunk has less than ``full``, the tokens from which on a device works at its best.

    Raises ``CostError`` for a negative coefficient, of which ``context`` alone may be, down to ``-pair``.
    """

    pair: float
    token: float
    slice: float = 0.0
    chunk: float = 0.0
    stage: float = 0.0
    embedding_token: float = 0.0
    embedding_chunk: float = 0.0
    head_token: float = 0.0
    head_chunk: float = 0.0
    context: float = 0.0
    reach: float = 0.0
    resumed: float = 0.0
    short: float = 0.0
    full: float = 0.0

    def __post_init__(self) -> None:
        _refuse_negative(self, *(each.name for each in fields(self) if each.name != "context"))
        if self.context < -self.pair:
            raise CostError(f"context is {self.context}; it must be at least minus pair, {-self.pair}")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A message of ``n`` bytes takes ``latency + n * seconds_per_byte`` (Eq. 2-3). Raises ``CostError`` if one is negative."""

    latency: float = 0.0
    seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        _refuse_negative(self, "latency", "seconds_per_byte")


WEIGHT_TOKEN_SHARE, WEIGHT_CHUNK_SHARE = 1 / 2, 1 / 4
"""What the weight gradients take of a backward's time, unless it is known: half of what its matrix products do, and of what a chunk
costs whatever its size a quarter, since they are few of its kernels."""


@dataclass(frozen=True, kw_only=True)
class AnalyticCost:
    """Implements :class:`infinipipe.cost.interface.CostModel`.

    Attributes:
        stage_layers: decoder layers of every part.
        forward, backward: time of the two passes.
        backward_input, backward_weight: time of the halves of a backward; if not given, the second takes what
            ``WEIGHT_TOKEN_SHARE`` and ``WEIGHT_CHUNK_SHARE`` say, the first the rest.
        recompute: what computing layers again in the backward adds, and what dropping their activations costs or saves the forward; as the
            forward if not given.
        memory: bytes of activations.
        states: bytes of parameters, gradients and optimizer states of every stage on one device.
        placement: the parts of every stage; if not given, each has one.
        optimizer: seconds of an optimizer step per byte of states.
        message: the link between stages.
        sequence_parallel: ``d_s``, devices that share a stage's tokens.
        all_to_all: the link of one all-to-all among them; its bytes are what one device sends and keeps.
        all_to_all_bytes: what a layer's forward exchanges for a token, all its all-to-alls together.
        all_to_alls: their number in a layer's forward; the backward has as many.
        name, source: where the coefficients come from.
        shape: the model that they describe, if known; its windows are those of the parts' layers in order.
    """

    stage_layers: tuple[int, ...]
    forward: PassTime
    backward: PassTime
    memory: MemoryUse
    states: tuple[int, ...]
    backward_input: PassTime | None = None
    backward_weight: PassTime | None = None
    recompute: PassTime | None = None
    placement: Placement = ONE_EACH
    optimizer: float = 0.0
    message: Link = field(default_factory=Link)
    sequence_parallel: int = 1
    all_to_all: Link = field(default_factory=Link)
    all_to_all_bytes: float = 0.0
    all_to_alls: int = 4
    name: str = ""
    source: str = ""
    shape: ModelShape | None = None

    def __post_init__(self) -> None:
        if not self.stage_layers or min(self.stage_layers) < 0:
            raise CostError(f"stage_layers is {list(self.stage_layers)}; it needs one entry >= 0 for every stage")
        if not self.placement.parts:
            object.__setattr__(self, "placement", Placement.plain(len(self.stage_layers)))
        if (fault := self.placement.fault()) is not None:
            raise CostError(fault)
        if self.placement.num_parts != len(self.stage_layers):
            raise CostError(
                f"the placement names {self.placement.num_parts} parts, but stage_layers has {len(self.stage_layers)} entries"
            )
        if len(self.states) != self.num_stages:
            raise CostError(f"states has {len(self.states)} entries for {self.num_stages} stages")
        if self.sequence_parallel < 1:
            raise CostError(f"sequence_parallel is {self.sequence_parallel}; it must be at least 1")
        _refuse_negative(self, "optimizer", "all_to_all_bytes")

    @cached_property
    def times(self) -> dict[str, PassTime]:
        """The time of every column of ``COLUMNS``."""
        back = self.backward
        weight = self.backward_weight or PassTime(
            pair=0.0, token=back.token * WEIGHT_TOKEN_SHARE, chunk=back.chunk * WEIGHT_CHUNK_SHARE
        )
        shared = ("token", "chunk", "stage")
        rest = replace(back, **{name: max(getattr(back, name) - getattr(weight, name), 0.0) for name in shared})
        halves = {"backward_input": self.backward_input or rest, "backward_weight": weight}
        return {"forward": self.forward, "backward": back, **halves}

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_parts(self) -> int:
        return len(self.stage_layers)

    @cached_property
    def layer_windows(self) -> tuple[tuple[int, ...], ...]:
        """The window of every layer of every part; 0 for none."""
        if self.shape is None:
            return tuple((0,) * count for count in self.stage_layers)
        return self.shape.stage_windows(self.stage_layers)

    @cached_property
    def window_counts(self) -> dict[int, int]:
        """How many layers of the model have each window."""
        return dict(Counter(window for windows in self.layer_windows for window in windows)) or {0: 0}

    @cached_property
    def _widest(self) -> tuple[int, ...]:
        """A window of every part that no layer of it exceeds; one of the model's where it has no layers."""
        default = min(self.window_counts)
        return tuple(0 if 0 in windows else max(windows, default=default) for windows in self.layer_windows)

    @property
    def pair_seconds(self) -> dict[int, float]:
        """Forward and backward of the layers of each window, over all parts, per unit of ``pairs`` of whole sequences."""
        seconds = (self.forward.pair + self.backward.pair) / self.sequence_parallel
        return {window: seconds * count for window, count in self.window_counts.items()}

    def layers_seconds(
        self, pass_time: PassTime, features: Features[Number], layers: float, *, exchanges: bool = True
    ) -> Number:
        """Seconds of one pass of ``layers`` layers, with its all-to-alls if it ``exchanges`` tokens for heads (Eq. 1-4)."""
        share = 1 / self.sequence_parallel
        per_layer = (
            pass_time.pair * features.pairs + pass_time.token * features.tokens + pass_time.slice * features.slices
        ) * share + pass_time.chunk
        if pass_time.context or pass_time.reach:
            per_layer = per_layer + (pass_time.context * features.crossed + pass_time.reach * features.reach) * share
        if pass_time.resumed:
            per_layer = per_layer + pass_time.resumed * features.resumed
        if pass_time.short:
            per_layer = per_layer + pass_time.short * np.maximum(
                pass_time.full - features.tokens * share, features.tokens * 0.0
            )
        if self.sequence_parallel > 1 and exchanges:
            sent = self.all_to_all_bytes / self.sequence_parallel * self.all_to_all.seconds_per_byte
            per_layer = per_layer + sent * features.tokens + self.all_to_alls * self.all_to_all.latency
        return per_layer * layers

    def part_seconds(self, column: str, features: Features[Number], part: int) -> Number:
        """Seconds of an action at a part without recompute; ``column`` is one of ``COLUMNS``.

        Weights' gradients need no tokens of other devices: the all-to-alls of a backward are all in its first half.
        """
        pass_time, exchanges = self.times[column], column != "backward_weight"
        per_token, per_chunk = 0.0, pass_time.stage
        if part == 0:
            per_token += pass_time.embedding_token
            per_chunk += pass_time.embedding_chunk
        if part == self.num_parts - 1:
            per_token += pass_time.head_token
            per_chunk += pass_time.head_chunk
        layers = self.layers_seconds(pass_time, features, self.stage_layers[part], exchanges=exchanges)
        return layers + features.tokens * (per_token / self.sequence_parallel) + per_chunk

    def activation(self, features: Features[Number], part: int) -> Number:
        """Bytes held between forward and backward without recompute (Eq. 5)."""
        held = self.memory.chunk + (self.memory.head if part == self.num_parts - 1 else 0.0)
        return self.layer_activation(features) * self.stage_layers[part] + features.tokens * (
            held / self.sequence_parallel
        )

    def layer_activation(self, features: Features[Number]) -> Number:
        """Bytes that one kept layer holds."""
        use = self.memory
        return (use.layer * features.tokens + use.layer_kv * (features.tokens - features.partial)) * (
            1 / self.sequence_parallel
        )

    def layer_saving(self, features: Features[Number]) -> Number:
        """Bytes that recomputing one layer frees (Eq. 9)."""
        return self.layer_activation(features) - features.tokens * (self.memory.layer_input / self.sequence_parallel)

    def weight_operands(self, features: Features[Number], part: int) -> Number:
        """Bytes held between the halves of a backward."""
        return features.tokens * (self.memory.weight_operands * self.stage_layers[part] / self.sequence_parallel)

    def transient(self, column: str, features: Features[Number], part: int, *, kept: int) -> Number:
        """Bytes that an action needs while it runs, with that many kept layers; ``column`` is one of ``COLUMNS``."""
        if column == "forward":
            return self._forward_transient(features, part, kept=kept)
        if column == "backward_weight":
            return features.tokens * 0.0 + self.memory.weight_block
        return self._backward_transient(features, part, kept=kept, splits=column == "backward_input")

    def _forward_transient(self, features: Features[Number], part: int, *, kept: int) -> Number:
        """What a layer needs beyond what it leaves, which depends on whether any is kept, and at the last part a token block."""
        use = self.memory
        per_token = (use.forward_kept if kept else use.forward_recomputed) / self.sequence_parallel
        need = features.tokens * per_token
        if part == self.num_parts - 1:
            need = need + use.head_needs(features.tokens * (1 / self.sequence_parallel))
        return need

    def _backward_transient(self, features: Features[Number], part: int, *, kept: int, splits: bool) -> Number:
        """What a backward needs beyond what is held when it starts::

            held     | kept layers, last first | recomputed layers' inputs |   kept layers are gone before the first
            needs    | a layer's working set   | the layer, and that       |   recomputed layer is computed again

        The gradient of the part's output is a message; at the last part, it takes the place of what the head held. The gradient of
        the embedding comes when what the layers held is gone. In the first half of a backward (``splits``) each layer leaves
        its operands behind.
        """
        layers, kept = self.stage_layers[part], min(kept, self.stage_layers[part])
        use = self.memory.backward_input if splits else self.memory.backward
        need = use.needs(features, 1 / self.sequence_parallel)
        if layers and not kept:
            need = need + self._layer_made_again(features)
            if splits:
                need = need + self._operands_left(features) * (layers - 1)
        if part == self.num_parts - 1:
            need = self._in_place_of_head(features, need)
        if part == 0 and self.memory.embedding_gradient:
            left = self.weight_operands(features, part) if splits else features.tokens * 0.0
            need = np.maximum(need, self._embedding_gradient(features, layers, kept) + left)
        return need

    def _layer_made_again(self, features: Features[Number]) -> Number:
        """A recomputed layer's activations, its input excepted where they hold that itself."""
        return self.layer_activation(features) - features.tokens * (self.memory.layer_shared / self.sequence_parallel)

    def _operands_left(self, features: Features[Number]) -> Number:
        """What a recomputed layer leaves for the weight gradients beyond the input that it no longer holds."""
        left = self.memory.weight_operands - self.memory.layer_input
        return features.tokens * (left / self.sequence_parallel)

    def _in_place_of_head(self, features: Features[Number], need: Number) -> Number:
        """The gradient of the output, and what exceeds the bytes that the head held until then."""
        use, share = self.memory, 1 / self.sequence_parallel
        beyond = np.maximum(need - features.tokens * (use.head * share), features.tokens * 0.0)
        return features.tokens * (use.message * share) + beyond

    def _embedding_gradient(self, features: Features[Number], layers: int, kept: int) -> Number:
        """The embedding's gradient and that of its output, less what the layers held."""
        use, share = self.memory, 1 / self.sequence_parallel
        freed = self.layer_activation(features) * kept + features.tokens * (use.layer_input * share * (layers - kept))
        return features.tokens * (use.message * share) - freed + use.embedding_gradient

    def _mean_features(self, chunk: Chunk, windows: Sequence[int]) -> Features[float]:
        return mean_features({window: chunk_features(chunk, window) for window in windows or (0,)}, windows)

    def pass_seconds(self, column: str, chunk: Chunk, part: int) -> float:
        return self.part_seconds(column, self._mean_features(chunk, self.layer_windows[part]), part)

    def recompute_seconds(self, chunk: Chunk, part: int, layers: int) -> float:
        features = self._mean_features(chunk, self.layer_windows[part][:layers])
        return self.layers_seconds(self.recompute or self.forward, features, layers)

    def message_seconds(self, num_tokens: int) -> float:
        return self.message.latency + self.message_bytes(num_tokens) * self.message.seconds_per_byte

    def activation_bytes(self, chunk: Chunk, part: int, layers: int) -> int:
        features = chunk_features(chunk)
        return round(self.activation(features, part) - layers * self.layer_saving(features))

    def kv_bytes(self, length: int, part: int) -> int:
        return round(self.memory.kv * length * self.stage_layers[part] / self.sequence_parallel)

    def dkv_bytes(self, length: int, part: int) -> int:
        return round(self.memory.dkv * length * self.stage_layers[part] / self.sequence_parallel)

    def weight_operand_bytes(self, chunk: Chunk, part: int) -> int:
        return round(self.weight_operands(chunk_features(chunk), part))

    def transient_bytes(self, column: str, chunk: Chunk, part: int, layers: int) -> int:
        features, total = chunk_features(chunk, self._widest[part]), self.stage_layers[part]
        need = self.transient(column, features, part, kept=total - layers)
        if column in PILING_UP and 0 < layers < total:
            # Operands pile up behind the kept layers too, until the last layer is computed again.
            all_again = self.transient(column, features, part, kept=0)
            need = max(need, all_again - (total - layers) * self.layer_saving(features))
        return round(need)

    def message_bytes(self, num_tokens: int) -> int:
        return round(self.memory.message * num_tokens / self.sequence_parallel)

    def state_bytes(self, stage: int) -> int:
        return self.states[stage]

    @property
    def element_bytes(self) -> float:
        """Bytes of an element that is computed with; 2 if the model's shape is not known."""
        return 2.0 if self.shape is None else self.memory.message / self.shape.hidden

    @property
    def optimizer_seconds(self) -> float:
        """What the optimizer adds to a step: its seconds on the stage with the most states."""
        return self.optimizer * max(self.states)

    def table(self, chunks: Sequence[Chunk]) -> CostTable:
        """The same figures for many chunks at once."""
        by_window = chunks_features(chunks, tuple(self.window_counts))
        features = next(iter(by_window.values()))
        means = [mean_features(by_window, windows) for windows in self.layer_windows]
        widest = [by_window[window] for window in self._widest]
        parts = range(self.num_parts)

        def rows(function: Callable[[int], FloatArray]) -> FloatArray:
            return np.stack([function(part) for part in parts])

        def seconds(column: str) -> FloatArray:
            return rows(lambda part: self.part_seconds(column, means[part], part))

        def transient(column: str, kept: Sequence[int]) -> FloatArray:
            return rows(lambda part: self.transient(column, widest[part], part, kept=kept[part]))

        # With several kept layers a backward needs no more than with one; the first half, whose operands pile up as soon as
        # one layer is recomputed, is charged for that by the full transient (see CostTable.transient_at).
        def transients(column: str) -> tuple[FloatArray, FloatArray]:
            some = self.stage_layers if column in PILING_UP else (1,) * self.num_parts
            return transient(column, some), transient(column, (0,) * self.num_parts)

        return CostTable(
            stage_layers=self.stage_layers,
            placement=self.placement,
            seconds=Columns(seconds),
            recompute=self._recompute_table(by_window),
            message=self.message.latency
            + features.tokens * (self.memory.message / self.sequence_parallel * self.message.seconds_per_byte),
            held={
                ACTIVATIONS.name: rows(lambda part: self.activation(features, part)),
                WEIGHT_OPERANDS.name: rows(lambda part: self.weight_operands(features, part)),
                **sequence_bytes(self, chunks),
            },
            layer_saving=rows(lambda part: self.layer_saving(features)),
            transient=Columns(transients),
            message_bytes=message_bytes(self, chunks),
        )

    def _recompute_table(self, by_window: Mapping[int, Features[FloatArray]]) -> FloatArray:
        """Seconds of recomputing the first layers of every part, none to all, (parts, most layers + 1, chunks)."""
        seconds = np.stack(
            [self.layers_seconds(self.recompute or self.forward, features, 1.0) for features in by_window.values()]
        )
        table = np.zeros((self.num_parts, max(self.stage_layers) + 1, seconds.shape[1]))
        for rows, windows in zip(table, self.layer_windows, strict=True):
            layers = np.array([[own == window for window in by_window] for own in windows], np.float64)
            rows[1 : len(windows) + 1] = np.cumsum(layers.reshape(-1, len(by_window)), axis=0) @ seconds
        return table

    def compute_seconds(self, lengths: Sequence[int]) -> float:
        """Forward and backward of whole sequences by the whole model, one device, without fixed cost and all-to-all."""
        layers, tokens = sum(self.stage_layers), sum(lengths)
        pairs = sum(
            count / max(layers, 1) * sum(prefix_pairs(length, window) for length in lengths)
            for window, count in self.window_counts.items()
        )
        total = 0.0
        for pass_time in (self.forward, self.backward):
            ends = pass_time.embedding_token + pass_time.head_token
            total += (pass_time.pair * pairs + pass_time.token * tokens) * layers + tokens * ends
        return total

    def chunk_seconds(self) -> float:
        """Fixed cost of one chunk over all parts, forward and backward (``b1``)."""
        layers, parts = sum(self.stage_layers), self.num_parts
        return sum(
            pass_time.chunk * layers + pass_time.stage * parts + pass_time.embedding_chunk + pass_time.head_chunk
            for pass_time in (self.forward, self.backward)
        )
