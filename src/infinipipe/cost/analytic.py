"""The analytic cost model: time and bytes as linear functions of a chunk's features (Eq. 1-5, 9-11)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from infinipipe.cost.shape import CostError, ModelShape
from infinipipe.cost.table import CostTable
from infinipipe.cost.work import FloatArray, Number, Work, chunk_work, chunks_work, larger, mean_work, prefix_pairs
from infinipipe.plan import Chunk


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
        slice: a layer's, per slice of the chunk: what packing costs.
        chunk: a layer's, per chunk (``b1`` over all layers).
        stage: a stage's, per chunk, whatever its layers.
        embedding_token: the first stage's, per token.
        embedding_chunk: the same, per chunk: in a backward, adding up the gradient of the whole embedding.
        head_token: the last stage's head and loss, per token.
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


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on one device without sequence parallelism; "per token" unless it says otherwise.

    Attributes:
        layer: a kept layer's activations, without keys and values.
        layer_kv: keys and values that a kept layer saves for tokens of whole sequences (cut ones use the store).
        layer_input: what a recomputed layer holds: its input.
        chunk: held per stage whatever is recomputed (rotary tables and the like).
        head: held on the last stage beside that: what the last norm saves and the gradient of the hidden states.
        kv: a layer's keys and values in the store of a cut sequence.
        dkv: their gradients.
        message: hidden states of one token.
        forward_kept, forward_recomputed: the most that the forward of one layer needs beyond what it leaves.
        layer_shared: of a layer's activations, those that are its input itself.
        backward: the most that the backward of a layer's MLP needs beyond the layer's activations and its gradient.
        backward_weight: what it needs beside its largest weight gradient, before that is added up.
        backward_attention: the same for its attention, when the MLP's activations are gone.
        backward_context: what attention needs then for each token that the slice of a cut sequence attends to.
        head_block: bytes of one token block of head and loss on the last stage.
        head_block_tokens: tokens of that block, of which a smaller chunk needs its share; 0 charges the block whole.
        weight_gradient: bytes of that weight gradient.
        embedding_gradient: bytes of the input embedding's, which ends a backward on the first stage.
    """

    layer: float
    layer_kv: float
    layer_input: float
    kv: float
    dkv: float
    message: float
    chunk: float = 0.0
    head: float = 0.0
    forward_kept: float = 0.0
    forward_recomputed: float = 0.0
    layer_shared: float = 0.0
    backward: float = 0.0
    backward_weight: float = 0.0
    backward_attention: float = 0.0
    backward_context: float = 0.0
    head_block: float = 0.0
    head_block_tokens: float = 0.0
    weight_gradient: float = 0.0
    embedding_gradient: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AnalyticCost:
    """Implements :class:`infinipipe.cost.interface.CostModel`.

    Attributes:
        stage_layers: decoder layers of every stage.
        forward, backward: time of the two passes.
        recompute: what computing layers again in the backward adds; as the forward if not given.
        memory: bytes of activations.
        states: bytes of parameters, gradients and optimizer states of every stage on one device.
        optimizer: seconds of an optimizer step per byte of states.
        message: the link between neighbouring stages.
        sequence_parallel: ``d_s``, devices that share a stage's tokens.
        all_to_all: the link of one all-to-all among them; its bytes are what one device sends and keeps.
        all_to_all_bytes: what a layer's forward exchanges for a token, all its all-to-alls together.
        all_to_alls: their number in a layer's forward; the backward has as many.
        name, source: where the coefficients come from.
        shape: the model that they describe, if known; its windows are those of the stages' layers in order.
    """

    stage_layers: tuple[int, ...]
    forward: PassTime
    backward: PassTime
    memory: MemoryUse
    states: tuple[int, ...]
    recompute: PassTime | None = None
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
        if len(self.states) != len(self.stage_layers):
            raise CostError(f"states has {len(self.states)} entries for {len(self.stage_layers)} stages")
        if self.sequence_parallel < 1:
            raise CostError(f"sequence_parallel is {self.sequence_parallel}; it must be at least 1")
        _refuse_negative(self, "optimizer", "all_to_all_bytes")

    @property
    def num_stages(self) -> int:
        return len(self.stage_layers)

    @cached_property
    def layer_windows(self) -> tuple[tuple[int, ...], ...]:
        """The window of every layer of every stage; 0 for none."""
        if self.shape is None:
            return tuple((0,) * count for count in self.stage_layers)
        return self.shape.stage_windows(self.stage_layers)

    @cached_property
    def window_counts(self) -> dict[int, int]:
        """How many layers of the model have each window."""
        return dict(Counter(window for windows in self.layer_windows for window in windows)) or {0: 0}

    @cached_property
    def _widest(self) -> tuple[int, ...]:
        """A window of every stage that no layer of it exceeds; one of the model's where it has no layers."""
        default = min(self.window_counts)
        return tuple(0 if 0 in windows else max(windows, default=default) for windows in self.layer_windows)

    @property
    def pair_seconds(self) -> dict[int, float]:
        """Forward and backward of the layers of each window, over all stages, per unit of ``pairs`` of whole sequences."""
        seconds = (self.forward.pair + self.backward.pair) / self.sequence_parallel
        return {window: seconds * count for window, count in self.window_counts.items()}

    def layers_time(self, time: PassTime, work: Work[Number], layers: float) -> Number:
        """Seconds of one pass of ``layers`` layers, all-to-alls included (Eq. 1-4)."""
        share = 1 / self.sequence_parallel
        per_layer = (time.pair * work.pairs + time.token * work.tokens + time.slice * work.slices) * share + time.chunk
        if time.context or time.reach:
            per_layer = per_layer + (time.context * work.crossed + time.reach * work.reach) * share
        if time.resumed:
            per_layer = per_layer + time.resumed * work.resumed
        if time.short:
            per_layer = per_layer + time.short * larger(time.full - work.tokens * share, work.tokens * 0.0)
        if self.sequence_parallel > 1:
            sent = self.all_to_all_bytes / self.sequence_parallel * self.all_to_all.seconds_per_byte
            per_layer = per_layer + sent * work.tokens + self.all_to_alls * self.all_to_all.latency
        return per_layer * layers

    def pass_time(self, time: PassTime, work: Work[Number], stage: int) -> Number:
        """Seconds of one pass of a stage without recompute."""
        per_token, per_chunk = 0.0, time.stage
        if stage == 0:
            per_token += time.embedding_token
            per_chunk += time.embedding_chunk
        if stage == self.num_stages - 1:
            per_token += time.head_token
            per_chunk += time.head_chunk
        layers = self.layers_time(time, work, self.stage_layers[stage])
        return layers + work.tokens * (per_token / self.sequence_parallel) + per_chunk

    def activation(self, work: Work[Number], stage: int) -> Number:
        """Bytes held between forward and backward without recompute (Eq. 5)."""
        held = self.memory.chunk + (self.memory.head if stage == self.num_stages - 1 else 0.0)
        return self.layer_activation(work) * self.stage_layers[stage] + work.tokens * (held / self.sequence_parallel)

    def layer_activation(self, work: Work[Number]) -> Number:
        """Bytes that one kept layer holds."""
        use = self.memory
        return (use.layer * work.tokens + use.layer_kv * (work.tokens - work.partial)) * (1 / self.sequence_parallel)

    def layer_saving(self, work: Work[Number]) -> Number:
        """Bytes that recomputing one layer frees (Eq. 9)."""
        return self.layer_activation(work) - work.tokens * (self.memory.layer_input / self.sequence_parallel)

    def forward_transient(self, work: Work[Number], stage: int, *, all_recomputed: bool) -> Number:
        """Bytes that a forward needs while it runs; they depend on whether any layer is kept."""
        use = self.memory
        per_token = (use.forward_recomputed if all_recomputed else use.forward_kept) / self.sequence_parallel
        need = work.tokens * per_token
        if stage == self.num_stages - 1:
            need = need + self._head_block(work)
        return need

    def _head_block(self, work: Work[Number]) -> Number:
        """Bytes of the largest token block that the head computes at once."""
        use, tokens = self.memory, work.tokens * (1 / self.sequence_parallel)
        if not use.head_block_tokens:
            return tokens * 0.0 + use.head_block
        missing = larger(use.head_block_tokens - tokens, tokens * 0.0)
        return use.head_block - missing * (use.head_block / use.head_block_tokens)

    def backward_transient(self, work: Work[Number], stage: int, *, kept: int) -> Number:
        """Bytes that a backward needs while it runs, with that many kept layers at least.

        Kept layers are behind recomputed ones and are freed before the first of those is computed again, so only a stage
        without a kept layer needs a layer's activations beyond what is held. The gradient of the stage's output is a
        message; on the last stage, it takes the place of what the head held. The gradient of the embedding comes when what
        the layers held is gone.
        """
        use, share = self.memory, 1 / self.sequence_parallel
        mlp = larger(
            work.tokens * (use.backward * share), work.tokens * (use.backward_weight * share) + use.weight_gradient
        )
        need = larger(mlp, (work.tokens * use.backward_attention + work.reach * use.backward_context) * share)
        layers, kept = self.stage_layers[stage], min(kept, self.stage_layers[stage])
        if layers and not kept:
            need = need + self.layer_activation(work) - work.tokens * (use.layer_shared * share)
        if stage == self.num_stages - 1:
            need = work.tokens * (use.message * share) + larger(
                need - work.tokens * (use.head * share), work.tokens * 0.0
            )
        if stage == 0 and use.embedding_gradient:
            freed = self.layer_activation(work) * kept + work.tokens * (use.layer_input * share * (layers - kept))
            need = larger(need, work.tokens * (use.message * share) - freed + use.embedding_gradient)
        return need

    def _mean_work(self, chunk: Chunk, windows: Sequence[int]) -> Work[float]:
        return mean_work({window: chunk_work(chunk, window) for window in windows or (0,)}, windows)

    def forward_seconds(self, chunk: Chunk, stage: int) -> float:
        return self.pass_time(self.forward, self._mean_work(chunk, self.layer_windows[stage]), stage)

    def backward_seconds(self, chunk: Chunk, stage: int) -> float:
        return self.pass_time(self.backward, self._mean_work(chunk, self.layer_windows[stage]), stage)

    def recompute_seconds(self, chunk: Chunk, stage: int, layers: int) -> float:
        work = self._mean_work(chunk, self.layer_windows[stage][:layers])
        return self.layers_time(self.recompute or self.forward, work, layers)

    def message_seconds(self, num_tokens: int) -> float:
        return self.message.latency + self.message_bytes(num_tokens) * self.message.seconds_per_byte

    def activation_bytes(self, chunk: Chunk, stage: int, layers: int) -> int:
        work = chunk_work(chunk)
        return round(self.activation(work, stage) - layers * self.layer_saving(work))

    def kv_bytes(self, length: int, stage: int) -> int:
        return round(self.memory.kv * length * self.stage_layers[stage] / self.sequence_parallel)

    def dkv_bytes(self, length: int, stage: int) -> int:
        return round(self.memory.dkv * length * self.stage_layers[stage] / self.sequence_parallel)

    def forward_transient_bytes(self, chunk: Chunk, stage: int, layers: int) -> int:
        all_recomputed = layers == self.stage_layers[stage]
        work = chunk_work(chunk, self._widest[stage])
        return round(self.forward_transient(work, stage, all_recomputed=all_recomputed))

    def backward_transient_bytes(self, chunk: Chunk, stage: int, layers: int) -> int:
        work = chunk_work(chunk, self._widest[stage])
        return round(self.backward_transient(work, stage, kept=self.stage_layers[stage] - layers))

    def message_bytes(self, num_tokens: int) -> int:
        return round(self.memory.message * num_tokens / self.sequence_parallel)

    def state_bytes(self, stage: int) -> int:
        return self.states[stage]

    @property
    def optimizer_seconds(self) -> float:
        """What the optimizer adds to a step: its seconds on the stage with the most states."""
        return self.optimizer * max(self.states)

    def table(self, chunks: Sequence[Chunk]) -> CostTable:
        """The same figures for many chunks at once."""
        works = chunks_work(chunks, tuple(self.window_counts))
        work = next(iter(works.values()))
        means = [mean_work(works, windows) for windows in self.layer_windows]
        widest = [works[window] for window in self._widest]
        stages = range(self.num_stages)

        def rows(function: Callable[[int], FloatArray]) -> FloatArray:
            return np.stack([function(stage) for stage in stages])

        return CostTable(
            stage_layers=self.stage_layers,
            forward=rows(lambda stage: self.pass_time(self.forward, means[stage], stage)),
            backward=rows(lambda stage: self.pass_time(self.backward, means[stage], stage)),
            recompute=self._recompute_table(works),
            message=self.message.latency
            + work.tokens * (self.memory.message / self.sequence_parallel * self.message.seconds_per_byte),
            activation=rows(lambda stage: self.activation(work, stage)),
            layer_saving=rows(lambda stage: self.layer_saving(work)),
            forward_transient=rows(lambda stage: self.forward_transient(work, stage, all_recomputed=False)),
            forward_transient_full=rows(lambda stage: self.forward_transient(work, stage, all_recomputed=True)),
            backward_transient=rows(lambda stage: self.backward_transient(widest[stage], stage, kept=1)),
            backward_transient_full=rows(lambda stage: self.backward_transient(widest[stage], stage, kept=0)),
        )

    def _recompute_table(self, works: Mapping[int, Work[FloatArray]]) -> FloatArray:
        """Seconds of recomputing the first layers of every stage, none to all, (stages, most layers + 1, chunks)."""
        seconds = np.stack([self.layers_time(self.recompute or self.forward, work, 1.0) for work in works.values()])
        table = np.zeros((self.num_stages, max(self.stage_layers) + 1, seconds.shape[1]))
        for rows, windows in zip(table, self.layer_windows, strict=True):
            layers = np.array([[own == window for window in works] for own in windows], np.float64)
            rows[1 : len(windows) + 1] = np.cumsum(layers.reshape(-1, len(works)), axis=0) @ seconds
        return table

    def work_seconds(self, lengths: Sequence[int]) -> float:
        """Forward and backward of whole sequences by the whole model, one device a stage, without fixed cost and all-to-all."""
        layers, tokens = sum(self.stage_layers), sum(lengths)
        pairs = sum(
            count / max(layers, 1) * sum(prefix_pairs(length, window) for length in lengths)
            for window, count in self.window_counts.items()
        )
        total = 0.0
        for time in (self.forward, self.backward):
            ends = time.embedding_token + time.head_token
            total += (time.pair * pairs + time.token * tokens) * layers + tokens * ends
        return total

    def chunk_seconds(self) -> float:
        """Fixed cost of one chunk over all stages, forward and backward (``b1``)."""
        layers, stages = sum(self.stage_layers), self.num_stages
        return sum(
            time.chunk * layers + time.stage * stages + time.embedding_chunk + time.head_chunk
            for time in (self.forward, self.backward)
        )
