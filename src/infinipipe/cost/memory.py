"""Bytes of activations: what is held for a chunk, and what its actions need beyond that."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from infinipipe.cost.features import Features, Number


@dataclass(frozen=True, kw_only=True)
class WorkingSet:
    """The most that the backward of one layer needs beyond the layer's activations and its output's gradient, in bytes.

    A backward passes through the MLP first. What it needs is the most of three::

        tokens * token                                        while it computes gradients of inputs
        tokens * beside + block                               while it holds gradients of weights
        tokens * attention + reach * context                  from the backward of attention on, when the MLP is done

    Attributes:
        token, beside, attention: per token; the last is less than nothing where the MLP's activations are more.
        block: of gradients of weights that exist at once, whatever the tokens.
        context: for each token that the slice of a cut sequence attends to.
    """

    token: float = 0.0
    beside: float = 0.0
    block: float = 0.0
    attention: float = 0.0
    context: float = 0.0

    def scaled(self, ratio: float) -> WorkingSet:
        """All of it times ``ratio``."""
        return WorkingSet(**{each.name: getattr(self, each.name) * ratio for each in fields(self)})

    def needs(self, features: Features[Number], share: float) -> Number:
        """Bytes on one of the devices that hold ``share`` of the tokens each."""
        tokens = features.tokens * share
        mlp = np.maximum(tokens * self.token, tokens * self.beside + self.block)
        return np.maximum(mlp, tokens * self.attention + features.reach * (self.context * share))


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on one device without sequence parallelism; "per token" unless it says otherwise.

    Attributes:
        layer: a kept layer's activations, without keys and values.
        layer_kv: keys and values that a kept layer saves for tokens of whole sequences (cut ones use the store).
        layer_input: what a recomputed layer holds: its input.
        chunk: held per part whatever is recomputed (rotary tables and the like).
        head: held at the last part beside that: what the last norm saves and the gradient of the hidden states.
        kv: a layer's keys and values in the store of a cut sequence.
        dkv: their gradients.
        message: hidden states of one token.
        forward_kept, forward_recomputed: the most that the forward of one layer needs beyond what it leaves.
        layer_shared: of a layer's activations, those that are its input itself.
        backward, backward_input: the most that the backward of one layer, or its first half, needs.
        weight_operands: a layer's inputs and output gradients of linear layers, kept between the halves of a backward.
        weight_block: bytes that a second half needs, whatever the tokens.
        head_block: bytes of one token block of head and loss at the last part.
        head_block_tokens: tokens of that block, of which a smaller chunk needs its share; 0 charges the block whole.
        head_gradient: of these, the bytes of the gradient of the logits, which lives alone while that of the weight is added up.
        head_product: bytes that the latter passes through, whatever the tokens.
        embedding_gradient: bytes of the input embedding's, which ends a backward at the first part.
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
    backward: WorkingSet = field(default_factory=WorkingSet)
    backward_input: WorkingSet = field(default_factory=WorkingSet)
    weight_operands: float = 0.0
    weight_block: float = 0.0
    head_block: float = 0.0
    head_block_tokens: float = 0.0
    head_gradient: float = 0.0
    head_product: float = 0.0
    embedding_gradient: float = 0.0

    def head_needs(self, tokens: Number) -> Number:
        """Bytes of the largest token block of head and loss, of a chunk of which this device has ``tokens``."""
        share = np.minimum(tokens / self.head_block_tokens, 1.0) if self.head_block_tokens else tokens * 0.0 + 1.0
        return np.maximum(share * self.head_block, share * self.head_gradient + self.head_product)
