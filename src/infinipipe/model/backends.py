"""Attention kernels behind one interface: packed segments whose queries are the last tokens of their keys.

Shapes: queries and outputs (query tokens, heads, head size), keys and values (key tokens, K/V heads, head size),
log-sum-exp (heads, query tokens) in float32, or float64 for float64. Segment ``i`` owns the next ``q_lens[i]`` queries and
``k_lens[i]`` keys; its query ``r`` attends to its keys up to ``k_lens[i] - q_lens[i] + r``, and with a window ``w`` only to
the last ``w`` of those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor


class AttentionBackend(Protocol):
    """Causal attention over packed segments, forward and backward."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_lens: Sequence[int],
        k_lens: Sequence[int],
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Outputs and log-sum-exp."""
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        q_lens: Sequence[int],
        k_lens: Sequence[int],
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values; those of keys and values may be in float32 for lower precisions."""
        ...


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(x: Tensor) -> Tensor:
    """(tokens, heads, size) as (1, heads, tokens, size)."""
    return x.transpose(0, 1).unsqueeze(0)


def _tokens_first(x: Tensor) -> Tensor:
    """(1, heads, tokens, size) as (tokens, heads, size)."""
    return x.squeeze(0).transpose(0, 1)


@lru_cache(maxsize=16)
def _band_mask(num_queries: int, num_keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """Additive mask of a block of queries that are the last of ``num_keys`` keys: causal and within ``window``."""
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)[None]
    mask = torch.zeros(num_queries, num_keys, dtype=dtype)
    return mask.masked_fill_((distance < 0) | (distance >= window), float("-inf"))


def _window_blocks(num_queries: int, num_keys: int, window: int) -> Iterator[tuple[int, int, int, int]]:
    """Blocks ``(first query, end of queries, first key, end of keys)`` in which a window is a narrow band."""
    block = max(16, min(256, window // 2))
    offset = num_keys - num_queries
    for first in range(0, num_queries, block):
        end = min(first + block, num_queries)
        yield first, end, max(0, offset + first - window + 1), offset + end


class CpuAttention:
    """PyTorch's CPU flash kernel.

    A segment with context is two calls, the context without a mask and the own tokens causally, merged by their
    log-sum-exp: the kernel's causal flag aligns queries and keys at their beginnings. A window is a row of blocks.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_lens: Sequence[int],
        k_lens: Sequence[int],
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        segments = []
        for q_part, k_part, v_part in zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True):
            qh, kh, vh = _heads_first(q_part), _heads_first(k_part), _heads_first(v_part)
            if window is not None and kh.shape[2] > window:
                segments.append(self._forward_window(qh, kh, vh, scale, window))
            else:
                segments.append(self._forward_causal(qh, kh, vh, scale))
        if len(segments) == 1:
            out, lse = segments[0]
            return _tokens_first(out), lse[0]
        return (
            torch.cat([_tokens_first(out) for out, _ in segments]),
            torch.cat([lse[0] for _, lse in segments], dim=1),
        )

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        q_lens: Sequence[int],
        k_lens: Sequence[int],
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = []
        parts = zip(
            grad.split(q_lens),
            q.split(q_lens),
            k.split(k_lens),
            v.split(k_lens),
            out.split(q_lens),
            lse.split(q_lens, dim=1),
            strict=True,
        )
        for g_part, q_part, k_part, v_part, o_part, l_part in parts:
            qh, kh, vh = _heads_first(q_part), _heads_first(k_part), _heads_first(v_part)
            gh, oh, lh = _heads_first(g_part), _heads_first(o_part), l_part.unsqueeze(0)
            if window is not None and kh.shape[2] > window:
                segment = self._backward_window(gh, qh, kh, vh, oh, lh, scale, window)
            else:
                segment = self._backward_causal(gh, qh, kh, vh, oh, lh, scale)
            gradients.append(tuple(_tokens_first(x) for x in segment))
        if len(gradients) == 1:
            dq, dk, dv = gradients[0]
        else:
            dq, dk, dv = (torch.cat(column) for column in zip(*gradients, strict=True))
        return dq, dk, dv

    @staticmethod
    def _forward_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        context = k.shape[2] - q.shape[2]
        out, lse = _flash(q, k[:, :, context:], v[:, :, context:], 0.0, True, scale=scale)
        if context == 0:
            return out, lse
        far, far_lse = _flash(q, k[:, :, :context], v[:, :, :context], 0.0, False, scale=scale)
        total = torch.logaddexp(lse, far_lse)
        near_weight = (lse - total).exp_().unsqueeze(-1)
        far_weight = (far_lse - total).exp_().unsqueeze(-1)
        if out.dtype == lse.dtype:
            return out.mul_(near_weight).addcmul_(far, far_weight), total
        return (out * near_weight).addcmul_(far, far_weight).to(out.dtype), total

    @staticmethod
    def _backward_causal(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        context = k.shape[2] - q.shape[2]
        dq, dk, dv = _flash_backward(grad, q, k[:, :, context:], v[:, :, context:], out, lse, 0.0, True, scale=scale)
        if context == 0:
            return dq, dk, dv
        far_dq, far_dk, far_dv = _flash_backward(
            grad, q, k[:, :, :context], v[:, :, :context], out, lse, 0.0, False, scale=scale
        )
        return dq.add_(far_dq), torch.cat([far_dk, dk], dim=2), torch.cat([far_dv, dv], dim=2)

    @staticmethod
    def _forward_window(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for a, b, c, d in _window_blocks(q.shape[2], k.shape[2], window):
            mask = _band_mask(b - a, d - c, window, q.dtype)
            out, lse = _flash(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], 0.0, False, attn_mask=mask, scale=scale)
            outs.append(out.transpose(1, 2))
            lses.append(lse)
        return torch.cat(outs, dim=1).transpose(1, 2), torch.cat(lses, dim=2)

    @staticmethod
    def _backward_window(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, window: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(k.dtype, torch.float32)
        dqs, dk, dv = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for a, b, c, d in _window_blocks(q.shape[2], k.shape[2], window):
            mask = _band_mask(b - a, d - c, window, q.dtype)
            block = (grad[:, :, a:b], q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], out[:, :, a:b], lse[:, :, a:b])
            dq_block, dk_block, dv_block = _flash_backward(*block, 0.0, False, attn_mask=mask, scale=scale)
            dqs.append(dq_block)
            dk[:, :, c:d] += dk_block
            dv[:, :, c:d] += dv_block
        return torch.cat(dqs, dim=2), dk, dv


class CudaAttention:
    """The flash kernel behind ``torch.nn.attention.varlen``: one call for all segments. Needs float16 or bfloat16."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_lens: Sequence[int],
        k_lens: Sequence[int],
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            _offsets(q_lens, q.device),
            _offsets(k_lens, k.device),
            max(q_lens),
            max(k_lens),
            0.0,
            True,
            False,
            scale=scale,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=0,
        )
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        q_lens: Sequence[int],
        k_lens: Sequence[int],
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            q,
            k,
            v,
            out,
            lse,
            _offsets(q_lens, q.device),
            _offsets(k_lens, k.device),
            max(q_lens),
            max(k_lens),
            0.0,
            True,
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            unused,
            scale=scale,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=0,
        )
        return dq, dk, dv


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Cumulative lengths from 0, int32, as the kernel wants them."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.to(device, non_blocking=True)


def get_backend(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend for tensors of that device and dtype. Raises ``ValueError`` where there is none."""
    if device.type == "cpu":
        return CpuAttention()
    if device.type == "cuda":
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"attention on CUDA needs a dtype of bfloat16 or float16, got {dtype}; set model.dtype")
        return CudaAttention()
    raise ValueError(f"there is no attention for devices of type {device.type!r}; use cpu or cuda")
