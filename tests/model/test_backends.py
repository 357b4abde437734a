from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infinipipe.model import backends
from infinipipe.model.backends import CpuAttention, CudaAttention, Segments, _offsets, get_backend, register_backend


def dense(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None) -> Tensor:
    """Softmax attention in float64 over explicit masks, differentiable."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    results = []
    for qs, ks, vs in zip(q.split(segments.queries), k.split(segments.keys), v.split(segments.keys), strict=True):
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
    Segments((1,), (1,)),
    Segments((7,), (7,)),
    Segments((64,), (64,)),
    Segments((5,), (10,)),
    Segments((5,), (25,)),
    Segments((3,), (51,)),
    Segments((1,), (40,)),
    Segments((4, 1, 20, 2), (4, 1, 20, 2)),
    Segments((6, 11), (30, 11)),
]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 10, 24, 25, 26, 100])
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
def test_forward_and_backward_equal_dense_softmax(segments: Segments, window: int | None, kv_heads: int) -> None:
    q, k, v, grad = inputs(sum(segments.queries), sum(segments.keys), kv_heads)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = dense(leaves[0], leaves[1], leaves[2], segments, 0.3, window)
    expected_gradients = torch.autograd.grad(expected, leaves, grad)
    backend = CpuAttention(0.3, window)
    out, lse = backend.forward(q, k, v, segments)
    gradients = backend.backward(grad, q, k, v, out, lse, segments)
    assert out.shape == q.shape
    assert lse.shape == (4, sum(segments.queries))
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-13)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 6])
def test_bfloat16_rounds_results_but_not_gradients_of_keys(window: int | None) -> None:
    segments = Segments((12,), (30,))
    q, k, v, grad = inputs(12, 30, 2, torch.bfloat16)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = dense(leaves[0], leaves[1], leaves[2], segments, 0.25, window)
    expected_gradients = torch.autograd.grad(expected, leaves, grad.double())
    backend = CpuAttention(0.25, window)
    out, lse = backend.forward(q, k, v, segments)
    dq, dk, dv = backend.backward(grad, q, k, v, out, lse, segments)
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
    CpuAttention(1.0, window=22).forward(q, k, v, Segments((50,), (71,)))
    assert pairs == 50 * 22


def test_the_cuda_call_fits_the_kernels_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from infinipipe.model import backends

    with FakeTensorMode():
        ends = torch.tensor([0, 5, 12], dtype=torch.int32)
        monkeypatch.setattr(backends, "_offsets", lambda lengths, device: ends)
        q, k, v, grad = inputs(12, 12, 2, torch.bfloat16)
        backend, segments = CudaAttention(1.0, window=3), Segments((5, 7), (5, 7))
        out, lse = backend.forward(q, k, v, segments)
        gradients = backend.backward(grad, q, k, v, out, lse, segments)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 12), torch.float32)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_offsets_start_at_zero() -> None:
    assert _offsets((3, 1, 4), torch.device("cpu")).tolist() == [0, 3, 4, 8]


def test_devices_without_a_kernel_are_refused() -> None:
    assert isinstance(get_backend(torch.device("cpu"), torch.float64, scale=1.0), CpuAttention)
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        get_backend(torch.device("cuda"), torch.float32, scale=1.0)
    with pytest.raises(ValueError, match="'xpu'"):
        get_backend(torch.device("xpu"), torch.float32, scale=1.0)


def test_a_registered_backend_takes_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_BACKENDS", dict(backends._BACKENDS))

    @register_backend("meta")
    class Half(CpuAttention):
        dtypes = (torch.float16,)

    assert isinstance(get_backend(torch.device("meta"), torch.float16, scale=1.0), Half)
    with pytest.raises(
        ValueError, match="attention on meta needs a dtype of float16, got torch.float32; set model.dtype"
    ):
        get_backend(torch.device("meta"), torch.float32, scale=1.0)
    assert register_backend("cpu")(Half) is Half
    assert isinstance(get_backend(torch.device("cpu"), torch.float16, scale=0.5, window=3), Half)
