"""Attention with context as one autograd function, plugged into transformers' attention registry.

Keys and values of a cut sequence live in the :class:`KVStore` from slice to slice; the function writes its own there and reads
both from there, in forward and backward alike, so that neither views nor copies of them are saved for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from infinipipe.model.backends import AttentionBackend, get_backend
from infinipipe.model.kv_store import KVStore
from infinipipe.model.sequence import SequenceShard
from infinipipe.plan import Chunk, Slice

IMPLEMENTATION = "infinipipe"
"""The name under which the function is registered; it stands in ``config._attn_implementation``."""


@dataclass(frozen=True)
class ChunkContext:
    """What the layers of a stage need to know of the chunk they compute: its slices, the stage's store, and, under sequence
    parallelism, which share of its tokens this process holds."""

    chunk: Chunk
    store: KVStore
    shard: SequenceShard | None = None
    whole_lengths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        wholes = self.chunk.slices[0 if self.chunk.partial is None else 1 :]
        object.__setattr__(self, "whole_lengths", tuple(piece.num_tokens for piece in wholes))

    def positions(self, device: torch.device) -> Tensor:
        """Position of every local token in its sequence, (1, tokens), int64."""
        ranges = [torch.arange(piece.start, piece.stop, device=device) for piece in self.chunk.slices]
        return self.local(torch.cat(ranges), 0).unsqueeze(0)

    def local(self, x: Tensor, fill: float) -> Tensor:
        """This process's share of the rows of ``x``, padding filled with ``fill``."""
        return x if self.shard is None else self.shard.local(x, fill)


class _ContextAttention(torch.autograd.Function):
    """Attention of a chunk: its partial slice to the whole prefix of its sequence, every whole sequence to itself.

    Tokens come first: queries (tokens, heads, head size), keys and values (tokens, K/V heads, head size). Under sequence
    parallelism they come and go as local tokens of all heads; what is computed and kept is all tokens of local heads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: ChunkContext,
        layer: int,
        scale: float,
        window: int | None,
        backend: AttentionBackend,
    ) -> Tensor:
        shard, copies = context.shard, 1
        if shard is not None:
            copies = shard.kv_copies(k.shape[1])
            q, k, v = _to_local_heads(q, k, v, context.chunk.num_tokens, copies, shard)
        piece, lengths = context.chunk.partial, context.whole_lengths
        border = 0 if piece is None else piece.num_tokens
        results = []
        if piece is not None:
            context.store.write(piece.sequence, layer, piece.length, piece.start, k[:border], v[:border])
            reach = _reach(piece, window)
            keys, values = context.store.read(piece.sequence, layer, reach, piece.stop)
            results.append(
                backend.forward(q[:border], keys, values, [border], [piece.stop - reach], scale=scale, window=window)
            )
        if lengths:
            own = (q[border:], k[border:], v[border:])
            results.append(backend.forward(*own, lengths, lengths, scale=scale, window=window))
        out, lse = _join(results)
        ctx.copies = copies
        ctx.context, ctx.layer, ctx.scale, ctx.window, ctx.backend = context, layer, scale, window, backend
        if piece is None:
            ctx.save_for_backward(q, out, lse, k, v)
        elif lengths:
            ctx.save_for_backward(q, out, lse, k[border:].clone(), v[border:].clone())
        else:
            ctx.save_for_backward(q, out, lse)
        return out if shard is None else shard.to_tokens(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        q, out, lse, *own = ctx.saved_tensors
        context: ChunkContext = ctx.context
        shard = context.shard
        if shard is not None:
            grad = shard.to_heads(grad, context.chunk.num_tokens)
        scale, window, backend = ctx.scale, ctx.window, ctx.backend
        piece, lengths = context.chunk.partial, context.whole_lengths
        border = 0 if piece is None else piece.num_tokens
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        if piece is not None:
            reach = _reach(piece, window)
            keys, values = context.store.read(piece.sequence, ctx.layer, reach, piece.stop)
            dq, dk, dv = backend.backward(
                grad[:border],
                q[:border],
                keys,
                values,
                out[:border],
                lse[:, :border],
                [border],
                [piece.stop - reach],
                scale=scale,
                window=window,
            )
            context.store.settle(piece.sequence, ctx.layer, piece.start, reach, dk, dv)
            parts.append((dq, dk[piece.start - reach :], dv[piece.start - reach :]))
        if lengths:
            parts.append(
                backend.backward(
                    grad[border:],
                    q[border:],
                    *own,
                    out[border:],
                    lse[:, border:],
                    lengths,
                    lengths,
                    scale=scale,
                    window=window,
                )
            )
        dq, dk, dv = parts[0] if len(parts) == 1 else (torch.cat(column) for column in zip(*parts, strict=True))
        dk, dv = dk.to(q.dtype), dv.to(q.dtype)
        if shard is not None:
            dq, dk, dv = shard.to_tokens(dq), _sum_copies(dk, ctx.copies, shard), _sum_copies(dv, ctx.copies, shard)
        return dq, dk, dv, None, None, None, None, None


def _to_local_heads(
    q: Tensor, k: Tensor, v: Tensor, num_tokens: int, copies: int, shard: SequenceShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Local tokens of all heads to all tokens of local heads; K/V heads too few for the group are repeated."""
    pair = torch.stack([k, v], dim=2).flatten(2).repeat_interleave(copies, dim=1)
    k, v = shard.to_heads(pair, num_tokens).unflatten(2, (2, k.shape[2])).unbind(2)
    return shard.to_heads(q, num_tokens), k.contiguous(), v.contiguous()


def _sum_copies(grad: Tensor, copies: int, shard: SequenceShard) -> Tensor:
    """Gradients of all tokens of local, repeated K/V heads to those of local tokens of all heads."""
    tokens = shard.to_tokens(grad)
    return tokens.unflatten(1, (-1, copies)).sum(2) if copies > 1 else tokens


def _reach(piece: Slice, window: int | None) -> int:
    """First token that a slice attends to."""
    return 0 if window is None else max(0, piece.start - window + 1)


def _join(results: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(results) == 1:
        return results[0]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results], dim=1)


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    chunk_context: ChunkContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that decoder layers call through transformers' registry.

    ``query`` (1, heads, tokens, head size), ``key`` and ``value`` (1, K/V heads, tokens, head size) hold a chunk's tokens
    after rotary embedding; the result is (1, tokens, heads, head size). Raises ``ValueError`` for features of a model that
    would make the result differ from the plain model's.
    """
    if chunk_context is None:
        raise ValueError(
            "the model's layers do not pass keyword arguments on to attention; it cannot be cut into slices"
        )
    for name in ("softcap", "s_aux", "sinks", "head_mask", "indices", "block_table"):
        if kwargs.get(name) is not None:
            raise ValueError(f"attention with {name!r} is not supported")
    if attention_mask is not None:
        raise ValueError("attention with a mask of the model's own is not supported")
    if dropout:
        raise ValueError(f"attention dropout of {dropout} is not supported; set it to 0 in the model's config")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError("attention that is not causal is not supported")
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"value heads of size {value.shape[-1]} beside query heads of {query.shape[-1]} are not supported"
        )
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    backend = get_backend(query.device, query.dtype)
    out = _ContextAttention.apply(q, k, v, chunk_context, module.layer_idx, scale, sliding_window, backend)
    return out.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, context_attention)
