from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from infinipipe.model.backends import CpuAttention, CudaAttention, _offsets, get_backend


def dense(
    q: Tensor, k: Tensor, v: Tensor, q_lens: Sequence[int], k_lens: Sequence[int], scale: float, window: int | None
) -> Tensor:
    """Softmax attention in float64 over explicit masks, differentiable."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    results = []
    for qs, ks, vs in zip(q.split(list(q_lens)), k.split(list(k_lens)), v.split(list(k_lens)), strict=True):
        position = torch.arange(len(ks) - len(qs), len(ks))[:, None]
        distance = position - torch.arange(len(ks))[None]
        seen = (distance >= 0) & (distance < (window or len(ks)))
        scores = torch.einsum("qhd,khd->hqk", qs, ks.repeat_interleave(group, 1)) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        results.append(torch.einsum("hqk,khd->qhd", weights, vs.repeat_interleave(group, 1)))
    return torch.cat(results)


def inputs(
    queries: int, keys: int, kv_heads: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    q, k, v, grad = (
        torch.randn(n, heads, 16, dtype=torch.float64, generator=generator).to(dtype)
        for n, heads in ((queries, 4), (keys, kv_heads), (keys, kv_heads), (queries, 4))
    )
    return q, k, v, grad


SEGMENTS = [
    ([1], [1]),
    ([7], [7]),
    ([64], [64]),
    ([5], [10]),
    ([5], [25]),
    ([3], [51]),
    ([1], [40]),
    ([4, 1, 20, 2], [4, 1, 20, 2]),
    ([6, 11], [30, 11]),
]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 10, 24, 25, 26, 100])
@pytest.mark.parametrize(("q_lens", "k_lens"), SEGMENTS)
def test_forward_and_backward_equal_dense_softmax(
    q_lens: list[int], k_lens: list[int], window: int | None, kv_heads: int
) -> None:
    q, k, v, grad = inputs(sum(q_lens), sum(k_lens), kv_heads)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = dense(leaves[0], leaves[1], leaves[2], q_lens, k_lens, 0.3, window)
    expected_gradients = torch.autograd.grad(expected, leaves, grad)
    backend = CpuAttention()
    out, lse = backend.forward(q, k, v, q_lens, k_lens, scale=0.3, window=window)
    gradients = backend.backward(grad, q, k, v, out, lse, q_lens, k_lens, scale=0.3, window=window)
    assert out.shape == q.shape
    assert lse.shape == (4, sum(q_lens))
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-13)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 6])
def test_bfloat16_rounds_results_but_not_gradients_of_keys(window: int | None) -> None:
    q, k, v, grad = inputs(12, 30, 2, torch.bfloat16)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = dense(leaves[0], leaves[1], leaves[2], [12], [30], 0.25, window)
    expected_gradients = torch.autograd.grad(expected, leaves, grad.double())
    backend = CpuAttention()
    out, lse = backend.forward(q, k, v, [12], [30], scale=0.25, window=window)
    dq, dk, dv = backend.backward(grad, q, k, v, out, lse, [12], [30], scale=0.25, window=window)
    assert (out.dtype, lse.dtype, dq.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert dk.dtype == dv.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected.detach(), rtol=0, atol=0.02)
    for gradient, reference in zip((dq, dk, dv), expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=0, atol=0.03)


def test_a_window_costs_no_more_than_its_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    from infinipipe.model import backends

    pairs = 0
    flash = backends._flash

    def counting(
        q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        nonlocal pairs
        queries, keys = q.shape[2], k.shape[2]
        assert not causal or queries == keys
        pairs += queries * (queries + 1) // 2 if causal else queries * keys
        out, lse = flash(q, k, v, dropout, causal, scale=scale)
        return out, lse

    monkeypatch.setattr(backends, "_flash", counting)
    q, k, v, _ = inputs(50, 71, 2)
    CpuAttention().forward(q, k, v, [50], [71], scale=1.0, window=22)
    assert pairs == 50 * 22


def test_the_cuda_call_fits_the_kernels_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from infinipipe.model import backends

    with FakeTensorMode():
        ends = torch.tensor([0, 5, 12], dtype=torch.int32)
        monkeypatch.setattr(backends, "_offsets", lambda lengths, device: ends)
        q, k, v, grad = inputs(12, 12, 2, torch.bfloat16)
        backend = CudaAttention()
        out, lse = backend.forward(q, k, v, [5, 7], [5, 7], scale=1.0, window=3)
        gradients = backend.backward(grad, q, k, v, out, lse, [5, 7], [5, 7], scale=1.0, window=3)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 12), torch.float32)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_offsets_start_at_zero() -> None:
    assert _offsets((3, 1, 4), torch.device("cpu")).tolist() == [0, 3, 4, 8]


def test_devices_without_a_kernel_are_refused() -> None:
    assert isinstance(get_backend(torch.device("cpu"), torch.float64), CpuAttention)
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        get_backend(torch.device("cuda"), torch.float32)
    with pytest.raises(ValueError, match="'meta'"):
        get_backend(torch.device("meta"), torch.float32)
