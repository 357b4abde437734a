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
from torch.nn.functional import pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from infinipipe.model.backends import AttentionBackend, Segments, get_backend
from infinipipe.model.kv_store import KVStore
from infinipipe.model.ulysses import SequenceShard
from infinipipe.plan import Chunk

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


@dataclass(frozen=True)
class _Ranges:
    """The ranges of queries and keys of a chunk that this process works on: the queries of its block of tokens, and their keys.

    Without sequence parallelism the block is the chunk. Else blocks cut across its partial slice and its whole sequences::

        tokens     context |   slice   |  A  |   B   |  C  |
        block 0            [-----]                              starts inside the slice
        its keys   [=============]                              from the store, up to its last query's
        block 1                  [---------------]              starts inside the slice, ends behind its border
        its keys   [==================][=========]              from the store; from the chunk, A's first on
        block 2                                  [---------]    starts behind the border
        its keys                             [=============]    from the chunk, B's first on: block 1 has B's first queries

    Attributes:
        border: tokens of the partial slice, which come first; 0 without one.
        queries: how many of the block's queries belong to it; they come first, too.
        first_key, end_key: positions in the sequence of the keys that those attend to.
        wholes: the whole sequences that the block overlaps: its queries, and the keys up to the last of these.
        first_whole, end_whole: the place of those keys among the chunk's tokens.
    """

    border: int
    queries: int
    first_key: int
    end_key: int
    wholes: Segments
    first_whole: int
    end_whole: int

    @property
    def slice_segments(self) -> Segments:
        """The partial slice's queries with the keys that they attend to."""
        return Segments((self.queries,), (self.end_key - self.first_key,))

    @classmethod
    def of(cls, context: ChunkContext, window: int | None) -> _Ranges:
        piece, num_tokens = context.chunk.partial, context.chunk.num_tokens
        low, high = (0, num_tokens) if context.shard is None else context.shard.block(num_tokens)
        border = queries = first_key = end_key = 0
        if piece is not None:
            border = piece.num_tokens
            queries = max(0, min(high, border) - low)
            first_key = end_key = piece.start
        if piece is not None and queries:
            first_query = piece.start + low
            first_key = 0 if window is None else max(0, first_query - window + 1)
            end_key = first_query + queries
        q_lens, k_lens, first, end, place = [], [], None, border, border
        for length in context.whole_lengths:
            a, b = max(low, place), min(high, place + length)
            if a < b:
                q_lens.append(b - a)
                k_lens.append(b - place)
                first, end = place if first is None else first, b
            place += length
        wholes = Segments(tuple(q_lens), tuple(k_lens))
        return cls(border, queries, first_key, end_key, wholes, border if first is None else first, end)


class _ContextAttention(torch.autograd.Function):
    """Attention of a chunk: its partial slice to the whole prefix of its sequence, every whole sequence to itself.

    Tokens come first: queries (tokens, heads, head size), keys and values (tokens, K/V heads, head size). Under sequence
    parallelism they come and go as local tokens of all heads; what is computed and kept is a block of tokens of local heads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: ChunkContext,
        layer: int,
        backend: AttentionBackend,
    ) -> Tensor:
        shard, piece, num_tokens = context.shard, context.chunk.partial, context.chunk.num_tokens
        ctx.copies = 1 if shard is None else shard.kv_copies(k.shape[1])
        if shard is not None:
            q, k, v = _to_local_heads(q, k, v, num_tokens, ctx.copies, shard)
        ranges = _Ranges.of(context, backend.window)
        results = []
        if piece is not None:
            context.store.write(
                piece.sequence, layer, piece.length, piece.start, k[: ranges.border], v[: ranges.border]
            )
        if piece is not None and ranges.queries:
            keys, values = context.store.read(piece.sequence, layer, ranges.first_key, ranges.end_key)
            results.append(backend.forward(q[: ranges.queries], keys, values, ranges.slice_segments))
        ctx.kv_shape = k.shape[1:]
        k, v = k[ranges.first_whole : ranges.end_whole], v[ranges.first_whole : ranges.end_whole]
        if ranges.wholes.queries:
            results.append(backend.forward(q[ranges.queries :], k, v, ranges.wholes))
        out, lse = _join(results, q)
        ctx.context, ctx.layer, ctx.backend = context, layer, backend
        # Backward reads the slice's keys and values from the store. Those of the whole sequences it needs saved: none, if the block has
        # no query of them; all of the chunk's as they are, if the block needs them all; else a copy of the rows that it needs, since
        # a view would keep those of the whole chunk alive until then, the slice's, which lie in the store, among them.
        if not ranges.wholes.queries:
            ctx.save_for_backward(q, out, lse)
        elif k.shape[0] == num_tokens:
            ctx.save_for_backward(q, out, lse, k, v)
        else:
            ctx.save_for_backward(q, out, lse, k.clone(), v.clone())
        return out if shard is None else shard.to_tokens(out, num_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        q, out, lse, *own = ctx.saved_tensors
        context: ChunkContext = ctx.context
        backend: AttentionBackend = ctx.backend
        shard, piece, num_tokens = context.shard, context.chunk.partial, context.chunk.num_tokens
        if shard is not None:
            grad = shard.to_heads(grad, num_tokens)
        ranges = _Ranges.of(context, backend.window)
        n = ranges.queries
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        if piece is not None:
            # A block inside the slice may, by a window, attend to none of the slice's first keys. What goes to the store spans the
            # slice at the least, zeros where this process has nothing to add.
            base = min(ranges.first_key, piece.start)
            if n:
                keys, values = context.store.read(piece.sequence, ctx.layer, ranges.first_key, ranges.end_key)
                result = backend.backward(grad[:n], q[:n], keys, values, out[:n], lse[:, :n], ranges.slice_segments)
                rows = ranges.first_key - base, piece.stop - base
                dq, dk, dv = result[0], *(_place(x, *rows) for x in result[1:])
            else:
                dq, dk, dv = q[:0], *(q.new_zeros(piece.num_tokens, *ctx.kv_shape) for _ in range(2))
            context.store.accumulate_gradients(piece.sequence, ctx.layer, piece.start, base, dk, dv)
            parts.append((dq, dk[piece.start - base :], dv[piece.start - base :]))
        if ranges.wholes.queries:
            keys, values = own
            result = backend.backward(grad[n:], q[n:], keys, values, out[n:], lse[:, n:], ranges.wholes)
            rows = ranges.first_whole - ranges.border, num_tokens - ranges.border
            parts.append((result[0], _place(result[1], *rows), _place(result[2], *rows)))
        elif context.whole_lengths:
            zeros = q.new_zeros(num_tokens - ranges.border, *ctx.kv_shape)
            parts.append((q[:0], zeros, zeros))
        dq, dk, dv = parts[0] if len(parts) == 1 else (torch.cat(column) for column in zip(*parts, strict=True))
        dk, dv = dk.to(q.dtype), dv.to(q.dtype)
        if shard is not None:
            dq = shard.to_tokens(dq, num_tokens)
            dk, dv = (_to_own_tokens(x, num_tokens, ctx.copies, shard) for x in (dk, dv))
        return dq, dk, dv, None, None, None


def _to_local_heads(
    q: Tensor, k: Tensor, v: Tensor, num_tokens: int, copies: int, shard: SequenceShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Local tokens of all heads to local heads: queries of the block, keys and values of all tokens.

    K/V heads too few for the processes that share them are repeated.
    """
    pair = torch.stack([k, v], dim=2).flatten(2).repeat_interleave(copies, dim=1)
    pair = shard.gather_blocks(shard.to_heads(pair, num_tokens), num_tokens)
    k, v = pair.unflatten(2, (2, k.shape[2])).unbind(2)
    return shard.to_heads(q, num_tokens), k.contiguous(), v.contiguous()


def _to_own_tokens(grad: Tensor, num_tokens: int, copies: int, shard: SequenceShard) -> Tensor:
    """Gradients of all tokens of local, repeated K/V heads to those of local tokens of all heads."""
    tokens = shard.to_tokens(shard.scatter_blocks(grad), num_tokens)
    return tokens.unflatten(1, (-1, copies)).sum(2) if copies > 1 else tokens


def _place(x: Tensor, first: int, total: int) -> Tensor:
    """``x`` as rows from ``first`` of ``total``, the others zero."""
    after = total - first - x.shape[0]
    return pad(x, [0, 0, 0, 0, first, after]) if first or after else x


def _join(results: Sequence[tuple[Tensor, Tensor]], q: Tensor) -> tuple[Tensor, Tensor]:
    if not results:
        return torch.empty_like(q), q.new_empty(q.shape[1], 0, dtype=torch.promote_types(q.dtype, torch.float32))
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
    backend = get_backend(query.device, query.dtype, scale=scale, window=sliding_window)
    out = _ContextAttention.apply(q, k, v, chunk_context, module.layer_idx, backend)
    return out.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, context_attention)
