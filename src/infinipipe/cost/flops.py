"""A cost model from a model's shape alone: time from floating-point operations, bytes from what autograd saves.

The operations are those of a dense decoder: ``2 * weights`` a token for the matrices of a layer, ``2 * query width`` for
each unit of ``(C + s)^2 - C^2`` (queries times keys, and weights times values, of which causal attention needs half), twice
that in the backward. The bytes are those of a Hugging Face decoder layer with an attention kernel that saves its
queries, keys, values, output and log-sum-exp. Head and loss compute their gradient with the forward, so their time is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinipipe.cost.analytic import AnalyticCost, Link, MemoryUse, PassTime
from infinipipe.cost.shape import CostError, ModelShape
from infinipipe.plan import ONE_EACH, Placement

FLOAT32_BYTES = 4
PRODUCT_BLOCK = 2**21
"""Elements of a weight's gradient that are computed at once, in the dtype of the computing, where the accumulator is wider."""


def memory_use(shape: ModelShape, *, element_bytes: int, block_tokens: int = 1024) -> MemoryUse:
    """Bytes of activations per token (section 4), for activations of ``element_bytes`` bytes an element.

    A norm saves a float32 copy of its input, the normalised input and its output; attention its queries, output and
    a float32 log-sum-exp a head; a gated MLP gate, activation, up-projection and their product. Head and loss run in
    blocks of ``block_tokens`` tokens, of which the float32 logits live, and beside them a narrower copy of them. Gradients of
    weights are added straight to their accumulators, by blocks of ``PRODUCT_BLOCK`` elements where these are wider.
    """
    e, hidden, inner = element_bytes, shape.hidden, shape.intermediate
    norms = shape.norms * (hidden * (FLOAT32_BYTES + 2 * e) + FLOAT32_BYTES)
    if shape.qk_norm:
        norms += (shape.query_width + shape.kv_width) * (FLOAT32_BYTES + e)
    attention = 2 * shape.query_width * e + shape.heads * FLOAT32_BYTES
    mlp = (4 if shape.gated else 2) * inner * e
    kv = 2 * shape.kv_width
    freed_before_attention = mlp + norms / 2
    working = (3 if shape.gated else 2) * inner
    query_side = 2 * shape.query_width + kv + hidden
    mlp_side = working + hidden
    return MemoryUse(
        layer=norms + attention + mlp,
        layer_kv=kv * e,
        layer_input=hidden * e,
        kv=kv * e,
        dkv=kv * max(e, FLOAT32_BYTES),
        message=hidden * e,
        chunk=2 * shape.head_dim * e,
        head=hidden * (FLOAT32_BYTES + 2 * e) + FLOAT32_BYTES,
        forward_kept=2 * hidden * e,
        forward_recomputed=(working + 3 * hidden) * e,
        layer_shared=hidden * e if e == FLOAT32_BYTES else 0,
        backward=2 * inner * e,
        backward_product=inner * e,
        backward_attention=(3 * shape.query_width + 2 * hidden) * e - freed_before_attention,
        backward_context=kv * (e + max(e, FLOAT32_BYTES)),
        head_block_tokens=block_tokens,
        head_block=block_tokens * shape.vocab * (e if e >= FLOAT32_BYTES else FLOAT32_BYTES + e),
        weight_operands=(2 * hidden + query_side + mlp_side) * e,
        mlp_operands=(working + 2 * hidden) * e,
        product_block=0 if e >= FLOAT32_BYTES else min(PRODUCT_BLOCK, hidden * max(inner, shape.query_width)) * e,
        embedding_gradient=shape.embedding_weights * e,
    )


def state_bytes(
    shape: ModelShape,
    stage_layers: Sequence[int],
    placement: Placement | None = None,
    *,
    bytes_per_parameter: float = 16.0,
    shards: int = 1,
) -> tuple[int, ...]:
    """Parameters, gradients and optimizer states of every stage on one device; ``stage_layers`` are those of every part.

    16 bytes a parameter are float32 AdamW (weight, gradient, two moments); ``shards`` devices share them (ZeRO). A stage that has
    both ends of a model with tied weights has them once.
    """
    last = len(stage_layers) - 1
    sizes = []
    for parts in (placement or Placement.plain(len(stage_layers))).parts:
        weights = sum(stage_layers[part] for part in parts) * (shape.layer_weights + shape.norms * shape.hidden)
        if 0 in parts:
            weights += shape.embedding_weights
        if last in parts:
            weights += shape.hidden + (0 if shape.tied and 0 in parts else shape.embedding_weights)
        sizes.append(round(weights * bytes_per_parameter / shards))
    return tuple(sizes)


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
        states: bytes of parameters, gradients and optimizer states of every stage; float32 AdamW if not given.
        block_tokens: tokens of a block of head and loss.
        placement: the parts of every stage; each has one if not given.

    Raises ``CostError``.
    """
    layers = sum(stage_layers)
    if layers != shape.layers:
        raise CostError(
            f"stage_layers {list(stage_layers)} add up to {layers}, but the model has {shape.layers} layers"
        )
    if flops_per_second <= 0:
        raise CostError(f"flops_per_second is {flops_per_second}; it must be positive")

    forward = PassTime(
        pair=2 * shape.query_width / flops_per_second,
        token=2 * shape.layer_weights / flops_per_second,
        chunk=chunk_seconds / 3 / layers,
        head_token=3 * 2 * shape.embedding_weights / flops_per_second,
    )
    backward = PassTime(pair=2 * forward.pair, token=2 * forward.token, chunk=2 * forward.chunk)
    return AnalyticCost(
        stage_layers=tuple(stage_layers),
        forward=forward,
        backward=backward,
        memory=memory_use(shape, element_bytes=element_bytes, block_tokens=block_tokens),
        states=tuple(states) if states is not None else state_bytes(shape, stage_layers, placement),
        placement=placement or ONE_EACH,
        message=message or Link(),
        sequence_parallel=sequence_parallel,
        all_to_all=all_to_all or Link(),
        all_to_all_bytes=2 * element_bytes * (shape.query_width + shape.kv_width),
        name="flops",
        source="floating-point operations of the model's shape",
        shape=shape,
    )
