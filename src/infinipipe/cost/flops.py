"""A cost model from a model's shape: time from floating-point operations, bytes from what autograd saves.

The operations are ``2 * elements`` a token for the matrices of a layer, ``2 * query width`` for
each unit of ``(C + s)^2 - C^2`` (queries times keys, and weights times values, of which causal attention needs half), twice
that in the backward. The bytes are those of a LLaMA layer with an attention kernel that saves its queries, keys, values,
output and log-sum-exp, unless those of the model's own layers are given. Head and loss compute their gradient with the forward, so
their time is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from infinipipe.cost.analytic import AnalyticCost, Link, PassTime
from infinipipe.cost.memory import MemoryUse, WorkingSet
from infinipipe.cost.shape import CostError, ModelShape
from infinipipe.cost.states import Holding, state_bytes
from infinipipe.plan import ONE_EACH, Placement

FLOAT32_BYTES = 4
PRODUCT_BLOCK = 2**21
"""Elements of a weight's gradient that are computed at once, in the dtype of the computing, where the accumulator is wider."""


def memory_use(shape: ModelShape, *, element_bytes: int, block_tokens: int = 1024) -> MemoryUse:
    """Bytes of activations of a LLaMA model of that shape (section 4), of ``element_bytes`` bytes an element.

    A norm saves a float32 copy of its input, the normalised input and its output; attention its queries, output and
    a float32 log-sum-exp a head; a gated MLP gate, activation, up-projection and their product.
    """
    e, hidden, inner = element_bytes, shape.hidden, shape.intermediate
    norms = 2 * (hidden * (FLOAT32_BYTES + 2 * e) + FLOAT32_BYTES)
    attention = 2 * shape.query_width * e + shape.heads * FLOAT32_BYTES
    mlp = 4 * inner * e
    kv = 2 * shape.kv_width
    freed_before_attention = mlp + norms / 2
    query_side = 2 * shape.query_width + kv + hidden
    block = 0 if e >= FLOAT32_BYTES else min(PRODUCT_BLOCK, hidden * max(inner, shape.query_width)) * e
    attends = (3 * shape.query_width + 2 * hidden) * e - freed_before_attention
    context = kv * (e + max(e, FLOAT32_BYTES))
    mlp_operands = (3 * inner + 2 * hidden) * e
    layers = MemoryUse(
        layer=norms + attention + mlp,
        layer_kv=kv * e,
        layer_input=hidden * e,
        kv=kv * e,
        dkv=kv * max(e, FLOAT32_BYTES),
        message=hidden * e,
        chunk=2 * shape.head_dim * e,
        head=hidden * (FLOAT32_BYTES + e) + FLOAT32_BYTES,
        forward_kept=2 * hidden * e,
        forward_recomputed=3 * (inner + hidden) * e,
        layer_shared=hidden * e if e == FLOAT32_BYTES else 0,
        backward=WorkingSet(token=2 * inner * e, beside=inner * e, block=block, attention=attends, context=context),
        # Without products what goes into the MLP's last matrix stays beside that one's gradient; then all its operands do.
        backward_input=WorkingSet(token=3 * inner * e, attention=attends + mlp_operands, context=context),
        weight_operands=(3 * hidden + query_side + 3 * inner) * e,
        weight_block=block,
    )
    return with_ends(layers, shape, element_bytes=e, block_tokens=block_tokens)


def with_ends(layers: MemoryUse, shape: ModelShape, *, element_bytes: int, block_tokens: int) -> MemoryUse:
    """``layers``, whose ``head`` is what the last norm saves, with embedding, head and loss.

    Head and loss run in blocks of ``block_tokens`` tokens, of which the float32 logits live, and beside them a narrower copy of
    them; then the gradient of the logits, and what the gradient of the weight passes through on its way into a wider accumulator.
    """
    e, logits = element_bytes, block_tokens * shape.vocab
    wide = e >= FLOAT32_BYTES
    return replace(
        layers,
        head=layers.head + shape.hidden * e,
        head_block_tokens=block_tokens,
        head_block=logits * (e if wide else FLOAT32_BYTES + e),
        head_gradient=logits * e,
        head_product=0 if wide else min(PRODUCT_BLOCK, shape.embedding_weights) * e,
        embedding_gradient=shape.embedding_weights * e,
    )


def flop_cost(
    shape: ModelShape,
    stage_layers: Sequence[int],
    *,
    element_bytes: int = 2,
    flops_per_second: float = 100e12,
    chunk_seconds: float = 0.0,
    sequence_parallel: int = 1,
    message: Link | None = None,
    all_to_all: Link | None = None,
    states: Sequence[int] | None = None,
    block_tokens: int = 1024,
    placement: Placement | None = None,
    layers: MemoryUse | None = None,
) -> AnalyticCost:
    """A cost model from the model's shape.

    Args:
        shape: sizes of the model.
        stage_layers: decoder layers of every part; they must add up to the model's.
        element_bytes: bytes of one activation.
        flops_per_second: what one device reaches.
        chunk_seconds: fixed cost of a chunk over all stages, a third of it in the forward.
        sequence_parallel: devices that share a stage's tokens.
        message, all_to_all: links between stages, and inside one; free if not given.
        states: bytes of parameters, gradients and optimizer states of every stage; those that :class:`Holding` has if not given.
        block_tokens: tokens of a block of head and loss.
        placement: the parts of every stage; each has one if not given.
        layers: bytes of activations of the model's own layers and last norm; those of a LLaMA model if not given.

    Raises ``CostError``.
    """
    if sum(stage_layers) != shape.layers:
        raise CostError(
            f"stage_layers {list(stage_layers)} add up to {sum(stage_layers)}, but the model has {shape.layers} layers"
        )
    if flops_per_second <= 0:
        raise CostError(f"flops_per_second is {flops_per_second}; it must be positive")

    forward = PassTime(
        pair=2 * shape.query_width / flops_per_second,
        token=2 * shape.mean_work / flops_per_second,
        chunk=chunk_seconds / 3 / shape.layers,
        head_token=3 * 2 * shape.embedding_weights / flops_per_second,
    )
    if layers is None:
        memory = memory_use(shape, element_bytes=element_bytes, block_tokens=block_tokens)
    else:
        memory = with_ends(layers, shape, element_bytes=element_bytes, block_tokens=block_tokens)
    holding = Holding(element_bytes=element_bytes, sequence_parallel=sequence_parallel)
    backward = PassTime(pair=2 * forward.pair, token=2 * forward.token, chunk=2 * forward.chunk)
    return AnalyticCost(
        stage_layers=tuple(stage_layers),
        forward=forward,
        backward=backward,
        memory=memory,
        states=tuple(states) if states is not None else state_bytes(shape, stage_layers, placement, holding),
        placement=placement or ONE_EACH,
        message=message or Link(),
        sequence_parallel=sequence_parallel,
        all_to_all=all_to_all or Link(),
        all_to_all_bytes=2 * element_bytes * (shape.query_width + shape.kv_width),
        name="flops",
        source="floating-point operations of the model's shape",
        shape=shape,
    )
