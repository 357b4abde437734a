"""What the CUDA backend must do, checked in one run of a few minutes on one device: results, memory, speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import LlamaConfig

from infinipipe.cost import flop_cost
from infinipipe.model import build_stage
from infinipipe.model.backends import CpuAttention, CudaAttention, Segments
from infinipipe.plan import Chunk, Pipeline, ReplicaPlan, build_replica, cut, whole
from infinipipe.planner.memory import replica_peaks
from infinipipe.runtime import Batch, Executor, Parameters, connect, step_locally
from infinipipe.runtime.footprint import footprint

CUDA = torch.device("cuda")
SEGMENTS = [
    Segments((1,), (1,)),
    Segments((137,), (137,)),
    Segments((2041,), (2041,)),
    Segments((1,), (2041,)),
    Segments((137,), (2041,)),
    Segments((512,), (4608,)),
    Segments((137, 1, 511, 2), (137, 1, 511, 2)),
    Segments((200, 33), (1137, 33)),
]


def tensors(queries: int, keys: int, heads: int, kv_heads: int, size: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = ((queries, heads, size), (keys, kv_heads, size), (keys, kv_heads, size), (queries, heads, size))
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]


def relative(a: Tensor, b: Tensor) -> float:
    """Root mean square of the difference, relative to that of ``b``."""
    difference = a.detach().cpu().double() - b.detach().cpu().double()
    return float(difference.norm() / b.detach().cpu().double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("window", [None, 1, 136, 137, 1000])
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
def test_attention_equals_float64(segments: Segments, window: int | None, kv_heads: int) -> None:
    q, k, v, grad = tensors(sum(segments.queries), sum(segments.keys), 8, kv_heads)
    exact = CpuAttention(0.125, window)
    qw, kw, vw = (x.double() for x in (q, k, v))
    expected, expected_lse = exact.forward(qw, kw, vw, segments)
    reference = exact.backward(grad.double(), qw, kw, vw, expected, expected_lse, segments)
    backend = CudaAttention(0.125, window)
    q, k, v, grad = (x.to(CUDA) for x in (q, k, v, grad))
    out, lse = backend.forward(q, k, v, segments)
    gradients = backend.backward(grad, q, k, v, out, lse, segments)
    assert lse.shape == expected_lse.shape
    assert lse.dtype == torch.float32
    assert (lse.cpu().double() - expected_lse).abs().max() < 2e-3
    assert relative(out, expected) < 5e-3
    scale = max(float(x.norm()) / x.numel() ** 0.5 for x in reference)
    for gradient, exactly in zip(gradients, reference, strict=True):
        error = (gradient.cpu().double() - exactly).norm() / exactly.numel() ** 0.5
        assert float(error) < 1e-2 * scale


def test_slices_of_results_may_be_given_to_backward() -> None:
    """A hybrid chunk's backward gets parts of the joined outputs, whose log-sum-exp is not contiguous."""
    q, k, v, grad = (x.to(CUDA) for x in tensors(100, 100, 8, 2))
    backend, both = CudaAttention(0.125, window=None), Segments((60, 40), (60, 40))
    out, lse = backend.forward(q, k, v, both)
    joint = backend.backward(grad, q, k, v, out, lse, both)
    parts = []
    for rows in (slice(0, 60), slice(60, 100)):
        size = (rows.stop - rows.start,)
        gradients = backend.backward(
            grad[rows], q[rows], k[rows], v[rows], out[rows], lse[:, rows], Segments(size, size)
        )
        parts.append(gradients)
    for whole_gradient, *pieces in zip(joint, *parts, strict=True):
        assert relative(torch.cat(pieces), whole_gradient) < 1e-3


def test_a_packed_neighbour_changes_no_bit_of_an_output() -> None:
    q, k, v, _ = (x.to(CUDA) for x in tensors(300, 300, 8, 2))
    backend, segments = CudaAttention(0.125, window=None), Segments((100, 137, 63), (100, 137, 63))
    before, _ = backend.forward(q, k, v, segments)
    for x in (q, k, v):
        x[100:237] = x[100:237].flip(0)
    after, _ = backend.forward(q, k, v, segments)
    assert torch.equal(before[:100], after[:100])
    assert torch.equal(before[237:], after[237:])


def llama(layers: int, hidden: int = 256) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        vocab_size=1024,
    )


def executor(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device, seed_dtype: torch.dtype | None = None
) -> Executor:
    stage = build_stage(config, (config.num_hidden_layers,), 0, dtype=seed_dtype or dtype, device=device)
    for parameter in stage.parameters():
        parameter.data = parameter.data.to(dtype)
    stage.dtype = dtype
    return Executor(stage, connect(1)[0], Parameters(stage), loss_block_tokens=256)


def test_a_step_in_bfloat16_is_near_float64_on_the_cpu() -> None:
    config, lengths = llama(2), [700, 137, 1, 2]
    pieces = cut(0, 700, [300, 600])
    chunks = (Chunk(pieces[:1]), Chunk(pieces[1:2]), Chunk((pieces[2], *whole(lengths, [1, 2, 3]))))
    replica = build_replica([Pipeline(chunks)], 1, recompute=[[0, 2, 1]])
    generator = torch.Generator().manual_seed(0)
    batch = Batch.from_tokens([torch.randint(0, 1024, (n,), generator=generator) for n in lengths])
    ours = executor(config, torch.bfloat16, CUDA)
    exact = executor(config, torch.float64, torch.device("cpu"), seed_dtype=torch.bfloat16)
    loss = step_locally([ours], replica, batch)[0].loss_sum
    expected = step_locally([exact], replica, batch)[0].loss_sum
    assert loss == pytest.approx(expected, rel=5e-3)
    reference = dict(exact.parameters.named())
    for name, parameter in ours.parameters.named():
        gradient, exactly = parameter.grad, reference[name].grad
        assert gradient is not None
        assert exactly is not None
        assert gradient.dtype == torch.float32
        assert relative(gradient, exactly) < 0.06, name


@pytest.mark.parametrize(("slices", "recompute"), [(1, 0), (1, 4), (8, 0), (8, 4)])
def test_the_memory_formula_agrees_with_the_allocator(slices: int, recompute: int) -> None:
    config, length = llama(4, 1024), 16384
    pieces = cut(0, length, [length * i // slices for i in range(1, slices)])
    chunks = tuple(Chunk((piece,)) for piece in pieces)
    replica: ReplicaPlan = build_replica([Pipeline(chunks)], 1, recompute=[[recompute] * slices])
    known = footprint(config, torch.bfloat16)
    cost = flop_cost(known.shape, (4,), element_bytes=2, states=[0], block_tokens=256, layers=known.layers)
    run = executor(config, torch.bfloat16, CUDA)
    batch = Batch.from_tokens([torch.arange(length) % 1024])
    step_locally([run], replica, batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step_locally([run], replica, batch)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    (formula,) = replica_peaks(replica, cost)
    print(f"\n{slices} slices, {recompute} recomputed: {peak / 2**20:.1f} MiB, formula {formula / 2**20:.1f} MiB")
    assert peak == pytest.approx(formula, rel=0.1)


def milliseconds(function: Callable[[], object], rounds: int = 20) -> float:
    """Median time of a function on the device."""
    times = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def attention_step(queries: int, keys: int) -> Callable[[], object]:
    """Forward and backward of the backend."""
    q, k, v, grad = (x.to(CUDA) for x in tensors(queries, keys, 32, 8, 128))
    backend, segments = CudaAttention(0.1, window=None), Segments((queries,), (keys,))

    def step() -> object:
        out, lse = backend.forward(q, k, v, segments)
        return backend.backward(grad, q, k, v, out, lse, segments)

    return step


@pytest.mark.parametrize("ratio", [0, 1, 4, 16])
def test_a_slice_with_context_is_as_fast_as_a_plain_call(ratio: int) -> None:
    queries = 4096
    pairs = queries * (queries * ratio) + queries * queries // 2
    plain = round((2 * pairs) ** 0.5)
    q, k, v, grad = (x.to(CUDA) for x in tensors(plain, plain, 32, 8, 128))
    for x in (q, k, v):
        x.requires_grad_()
    offsets = torch.tensor([0, plain], dtype=torch.int32, device=CUDA)

    def ideal() -> object:
        out = varlen_attn(q, k, v, offsets, offsets, plain, plain, window_size=(-1, 0), enable_gqa=True, scale=0.1)
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out, (q, k, v), grad)

    ours = milliseconds(attention_step(queries, queries * (ratio + 1)))
    best = milliseconds(ideal)
    operations = 3.5 * 4 * 128 * 32 * pairs
    print(f"\ncontext/slice {ratio}: {operations / ours / 1e9:.0f} TFLOP/s, ratio to a plain call {ours / best:.3f}")
    assert ours / best < 1.3
