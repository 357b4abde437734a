"""Attention kernels behind one interface: packed segments whose queries are the last tokens of their keys.

Shapes: queries and outputs (query tokens, heads, head size), keys and values (key tokens, K/V heads, head size),
log-sum-exp (heads, query tokens) in float32, or float64 for float64.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Packed segments: the next ``queries[i]`` queries attend to the next ``keys[i]`` keys.

    Query ``r`` of a segment attends to its keys up to ``keys[i] - queries[i] + r``.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class AttentionBackend(ABC):
    """A layer's causal attention over packed segments, forward and backward.

    Attributes:
        dtypes: those that the kernel takes; all if empty.
        scale: factor of a query's products with keys.
        window: the most keys that a query attends to, the last of those that it may; ``None`` for all.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    scale: float
    window: int | None

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """Outputs and log-sum-exp."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values; those of keys and values may be in float32 for lower precisions."""


Backend = TypeVar("Backend", bound=AttentionBackend)

_BACKENDS: dict[str, type[AttentionBackend]] = {}


def register_backend(device_type: str) -> Callable[[type[Backend]], type[Backend]]:
    """Compute attention on devices of that type with a class, in place of what was registered for them before, in this process."""

    def register(backend: type[Backend]) -> type[Backend]:
        _BACKENDS[device_type] = backend
        return backend

    return register


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


_WINDOW_BLOCK = 128
"""Queries of a block under a window; within 512 keys, the backward kernel computes a causal part like a full one."""


def _heads_first(x: Tensor) -> Tensor:
    """(tokens, heads, size) as (1, heads, tokens, size)."""
    return x.transpose(0, 1).unsqueeze(0)


def _tokens_first(x: Tensor) -> Tensor:
    """(1, heads, tokens, size) as (tokens, heads, size)."""
    return x.squeeze(0).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _Part:
    """A kernel call: the first ``queries`` of a block with the keys ``[first_key, end_key)`` of the segment.

    Either every query attends to all of them, or query ``r`` to the first ``r + 1`` (``causal``), or, ``reverse``, to all but
    the first ``r``.
    """

    queries: int
    first_key: int
    end_key: int
    causal: bool = False
    reverse: bool = False


def _blocks(num_queries: int, num_keys: int, window: int | None) -> Iterator[tuple[int, list[_Part]]]:
    """Blocks of a segment's queries: the first query of each, and the parts that make up its attention exactly.

    Queries that the window does not limit form one block: own tokens causally, and all of the context. Others form blocks
    of at most ``window``: own tokens causally, keys that are within the window of all, and those that leave it one by one.
    """
    offset = num_keys - num_queries
    free = num_queries if window is None or num_keys <= window else max(0, window - 1 - offset)
    if free:
        context = [_Part(free, 0, offset)] if offset else []
        yield 0, [_Part(free, offset, offset + free, causal=True), *context]
    if free == num_queries or window is None:
        return
    block = min(window, _WINDOW_BLOCK)
    for first in range(free, num_queries, block):
        size, own = min(block, num_queries - first), offset + first
        parts = [_Part(size, own, own + size, causal=True)]
        if size < window:
            parts.append(_Part(size, own - window + size, own))
        if size > 1:
            parts.append(_Part(size - 1, own - window + 1, own - window + size, causal=True, reverse=True))
        yield first, parts


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add the attention to further keys to that of the first queries, in place."""
    rows = other.shape[2]
    out, lse = out[:, :, :rows], lse[:, :, :rows]
    total = torch.logaddexp(lse, other_lse)
    weight = (lse - total).exp_().unsqueeze(-1)
    other_weight = (other_lse - total).exp_().unsqueeze(-1)
    if out.dtype == lse.dtype:
        out.mul_(weight).addcmul_(other, other_weight)
    else:
        out.copy_((out * weight).addcmul_(other, other_weight))
    lse.copy_(total)


@register_backend("cpu")
class CpuAttention(AttentionBackend):
    """PyTorch's CPU flash kernel.

    A segment is cut so that every call has all of its keys or is causal from its first key on, which is the only causal
    form that the kernel knows; no mask is built and nothing computed in vain. Results merge by their log-sum-exp.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        parts = zip(q.split(segments.queries), k.split(segments.keys), v.split(segments.keys), strict=True)
        results = [self._forward_segment(*map(_heads_first, part)) for part in parts]
        if len(results) == 1:
            out, lse = results[0]
            return _tokens_first(out), lse[0]
        return (
            torch.cat([_tokens_first(out) for out, _ in results]),
            torch.cat([lse[0] for _, lse in results], dim=1),
        )

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = []
        parts = zip(
            grad.split(segments.queries),
            q.split(segments.queries),
            k.split(segments.keys),
            v.split(segments.keys),
            out.split(segments.queries),
            lse.split(segments.queries, dim=1),
            strict=True,
        )
        for *tensors, lse_part in parts:
            operands = [*map(_heads_first, tensors), lse_part.unsqueeze(0)]
            segment = self._backward_segment(*operands)
            gradients.append(tuple(_tokens_first(x) for x in segment))
        if len(gradients) == 1:
            dq, dk, dv = gradients[0]
        else:
            dq, dk, dv = (torch.cat(column) for column in zip(*gradients, strict=True))
        return dq, dk, dv

    def _forward_segment(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for first, parts in _blocks(q.shape[2], k.shape[2], self.window):
            results = []
            for part in parts:
                rows, keys = slice(first, first + part.queries), slice(part.first_key, part.end_key)
                operands = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
                if part.reverse:
                    out, lse = _flash(*(x.flip(2) for x in operands), 0.0, True, scale=self.scale)
                    results.append((out.flip(2), lse.flip(2)))
                else:
                    results.append(_flash(*operands, 0.0, part.causal, scale=self.scale))
            (out, lse), *others = results
            for other, other_lse in others:
                _merge(out, lse, other, other_lse)
            outs.append(out.transpose(1, 2))
            lses.append(lse)
        if len(outs) == 1:
            return outs[0].transpose(1, 2), lses[0]
        return torch.cat(outs, dim=1).transpose(1, 2), torch.cat(lses, dim=2)

    def _backward_segment(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if q.shape[2] == k.shape[2] and (self.window is None or k.shape[2] <= self.window):
            dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, 0.0, True, scale=self.scale)
            return dq, dk, dv
        wide = torch.promote_types(k.dtype, torch.float32)
        totals = [torch.zeros_like(x, dtype=wide) for x in (q, k, v)]
        for first, parts in _blocks(q.shape[2], k.shape[2], self.window):
            for part in parts:
                rows, keys = slice(first, first + part.queries), slice(part.first_key, part.end_key)
                operands = [
                    x[:, :, where]
                    for x, where in zip((grad, q, k, v, out, lse), (rows, rows, keys, keys, rows, rows), strict=True)
                ]
                if part.reverse:
                    operands = [x.flip(2) for x in operands]
                gradients = _flash_backward(*operands, 0.0, part.causal, scale=self.scale)
                for total, gradient, where in zip(totals, gradients, (rows, keys, keys), strict=True):
                    total[:, :, where] += gradient.flip(2) if part.reverse else gradient
        dq, dk, dv = totals
        return dq.to(q.dtype), dk, dv


@register_backend("cuda")
class CudaAttention(AttentionBackend):
    """The flash kernel behind ``torch.nn.attention.varlen``: one call for all segments."""

    dtypes = (torch.bfloat16, torch.float16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_bounds(segments, q.device), 0.0, True, False, **self._options
        )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(0, device=q.device)
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        bounds = _bounds(segments, q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, lse.contiguous(), *bounds, 0.0, True, rng_state, unused, **self._options
        )
        return dq, dk, dv

    @property
    def _options(self) -> dict[str, Any]:
        left = -1 if self.window is None else self.window - 1
        return {"scale": self.scale, "window_size_left": left, "window_size_right": 0}


def _bounds(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """What the kernel wants to know of segments: where queries and keys end, and the longest of each."""
    queries, keys = segments.queries, segments.keys
    return _offsets(queries, device), _offsets(keys, device), max(queries), max(keys)


@lru_cache(maxsize=64)
def _offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Cumulative lengths from 0, int32, as the kernel wants them; the same for all layers of a chunk."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def get_backend(
    device: torch.device, dtype: torch.dtype, *, scale: float, window: int | None = None
) -> AttentionBackend:
    """The backend for tensors of that device and dtype. Raises ``ValueError`` where there is none."""
    backend = _BACKENDS.get(device.type)
    if backend is None:
        raise ValueError(
            f"there is no attention for devices of type {device.type!r}; use one of {', '.join(sorted(_BACKENDS))}"
        )
    if backend.dtypes and dtype not in backend.dtypes:
        named = " or ".join(str(own).removeprefix("torch.") for own in backend.dtypes)
        raise ValueError(f"attention on {device.type} needs a dtype of {named}, got {dtype}; set model.dtype")
    return backend(scale, window)
