from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, Qwen3MoeConfig

from infinipipe.cost import flop_cost
from infinipipe.model import build_stage
from infinipipe.plan import (
    ActionLists,
    BackwardInput,
    BackwardWeight,
    Channel,
    Chunk,
    Forward,
    Pipeline,
    Placement,
    Plan,
    ReplicaPlan,
    build_replica,
    cut,
    whole,
)
from infinipipe.planner.memory import replica_peaks
from infinipipe.profile.workers import with_layers
from infinipipe.runtime import Batch, Executor, MemoryMeter, Parameters, connect, step_locally
from infinipipe.runtime.footprint import footprint
from infinipipe.verify.families import FAMILIES

KIB = 1024


def test_counts_storages_from_allocation_to_release() -> None:
    with MemoryMeter() as meter:
        a = torch.zeros(256)
        b = torch.empty(512)
        assert meter.current == 3 * KIB
        del a
        assert meter.current == 2 * KIB
        c = b + 1
        assert meter.current == 4 * KIB
        del b, c
    assert (meter.current, meter.peak) == (0, 4 * KIB)


def test_views_and_operators_in_place_allocate_nothing() -> None:
    outside = torch.zeros(256)
    with MemoryMeter() as meter:
        view = outside.view(16, 16)[2:].transpose(0, 1)
        outside.add_(1).mul_(2)
        torch.add(outside, 1, out=outside)
        outside.view(16, 16).detach().copy_(outside.view(16, 16))
        assert meter.peak == 0
        inside = torch.zeros(256)
        half = inside[:128]
        del inside
        assert meter.current == KIB, "a view keeps its storage alive"
        del half, view
    assert meter.current == 0


def test_what_exists_before_is_not_counted_when_it_goes() -> None:
    before = torch.zeros(256)
    with MemoryMeter() as meter:
        alias = before[:1]
        del before, alias
        assert meter.current == 0


def test_sees_what_autograd_saves_and_frees_in_backward() -> None:
    x = torch.zeros(256, requires_grad=True)
    with MemoryMeter() as meter:
        y = x.exp().exp()
        gc.collect()
        assert meter.current == 2 * KIB, "the inner result is only held by the graph"
        total = y.sum()
        del y
        total.backward()
        assert meter.current == KIB + 4, "the gradient and the sum"
        del total
        x.grad = None
        assert meter.current == 0


def test_storages_may_be_freed_by_another_thread() -> None:
    with MemoryMeter() as meter:
        held = [torch.zeros(256) for _ in range(100)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert meter.current == 0
        assert torch.zeros(1).numel() == 1
    assert meter.peak == 100 * KIB


def test_reset_peak_starts_from_what_is_live() -> None:
    with MemoryMeter() as meter:
        kept, dropped = torch.zeros(256), torch.zeros(1024)
        del dropped
        meter.reset_peak()
        assert meter.peak == KIB
        del kept


CONFIG = LlamaConfig(
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=192,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
)
LENGTH, BLOCK = 512, 16


def prepare(
    slices: int,
    recompute: int,
    config: LlamaConfig = CONFIG,
    *,
    stage_layers: tuple[int, ...] = (2,),
    order: Callable[[ReplicaPlan], ActionLists] | None = None,
) -> tuple[Callable[[], None], int]:
    """A step of one stage, which has all parts, on one sequence, and the formula's peak of it.

    ``recompute`` layers of every part are computed again; ``order`` makes other action lists of GPipe's chunks.
    """
    pieces = cut(0, LENGTH, [LENGTH * i // slices for i in range(1, slices)])
    placement = Placement((tuple(range(len(stage_layers))),))
    rows = tuple((min(recompute, layers),) * slices for layers in stage_layers)
    chunks = (Pipeline(tuple(Chunk((p,)) for p in pieces)),)
    replica = build_replica(chunks, placement, schedule="interleaved", recompute=rows)
    if order is not None:
        replica = replace(replica, actions=order(replica))
    plan = Plan(stage_layers, (LENGTH,), (replica,))
    plan.validate()
    known = footprint(config, torch.float32)
    cost = flop_cost(
        known.shape,
        stage_layers,
        element_bytes=4,
        states=[0],
        block_tokens=BLOCK,
        placement=placement,
        layers=known.layers,
    )
    stage = build_stage(config, stage_layers, placement.parts[0])
    executor = Executor(stage, connect(1)[0], Parameters(stage), loss_block_tokens=BLOCK)
    batch = Batch.from_tokens([torch.arange(LENGTH) % 128])

    def step() -> None:
        step_locally([executor], replica, batch)

    step()
    return step, replica_peaks(replica, cost)[0]


def allocator_peak(step: Callable[[], None]) -> int:
    """Peak of what the allocator hands out during a step, kernels' own buffers included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    live = peak = 0
    assert profiler.profiler is not None
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    changes = []
    while pending:
        event = pending.pop()
        pending += event.children
        if event.typed[0] == _EventType.Allocation:
            changes.append((event.start_time_ns, event.typed[1].alloc_size))
    for _, size in sorted(changes, key=lambda change: change[0]):
        live += size
        peak = max(peak, live)
    return peak


def halves_at_the_end(replica: ReplicaPlan) -> ActionLists:
    """All forwards, all first halves, then all second halves: as many operands are held as there can be."""
    chunks, parts = range(len(replica.chunks)), range(replica.placement.num_parts)
    names = [None] if len(parts) == 1 else parts
    forwards = [Forward(chunk, part) for part in names for chunk in chunks]
    first = [BackwardInput(chunk, part) for part in reversed(names) for chunk in reversed(chunks)]
    second = [BackwardWeight(chunk, part) for part in names for chunk in chunks]
    return ((*forwards, *first, *second),)


def halves_at_once(replica: ReplicaPlan) -> ActionLists:
    """The second half of every backward right after its first."""
    chunks, parts = range(len(replica.chunks)), range(replica.placement.num_parts)
    names = [None] if len(parts) == 1 else parts
    forwards = [Forward(chunk, part) for part in names for chunk in chunks]
    halves = [
        half(chunk, part)
        for part in reversed(names)
        for chunk in reversed(chunks)
        for half in (BackwardInput, BackwardWeight)
    ]
    return ((*forwards, *halves),)


@pytest.mark.parametrize("recompute", [0, 1, 2])
@pytest.mark.parametrize("slices", [1, 8])
@pytest.mark.parametrize("stage_layers", [(2,), (1, 1)])
@pytest.mark.parametrize("order", [halves_at_the_end, halves_at_once, None])
def test_the_formula_bounds_split_backwards_and_parts(
    slices: int, recompute: int, stage_layers: tuple[int, ...], order: Callable[[ReplicaPlan], ActionLists] | None
) -> None:
    step, formula = prepare(slices, recompute, stage_layers=stage_layers, order=order)
    with MemoryMeter() as meter:
        step()
    assert meter.current == 0
    assert 0.995 <= formula / meter.peak <= 1.08


@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("slices", [1, 8])
def test_the_formula_bounds_a_step_closely(slices: int, recompute: int) -> None:
    step, formula = prepare(slices, recompute)
    with MemoryMeter() as meter:
        step()
    assert meter.current == 0
    assert 0.995 <= formula / meter.peak <= 1.06


class Alone:
    """The transport of a stage without neighbours: what it receives is made up, what it sends goes nowhere."""

    def receive(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Alone.Made:
        return self.Made(torch.randn(shape).to(dtype))

    def send(self, channel: Channel, tensor: Tensor) -> None: ...

    def finish(self) -> None: ...

    class Made:
        """A message that is there."""

        def __init__(self, message: Tensor) -> None:
            self._message = message

        def ready(self) -> bool:
            return True

        def wait(self) -> Tensor:
            return self._message


SIZES = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 2000, "head_dim": 16}
MODELS = {
    **{name: partial(family, **SIZES) for name, family in FAMILIES.items()},
    "qwen3_moe": partial(
        Qwen3MoeConfig,
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
    ),
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_formula_holds_for_every_family_and_stage(name: str, dtype: torch.dtype, stage: int, split: bool) -> None:
    config, layers = with_layers(MODELS[name](), 6), (2, 2, 2)
    known = footprint(config, dtype)
    cost = flop_cost(
        known.shape, layers, element_bytes=dtype.itemsize, states=[0] * 3, block_tokens=64, layers=known.layers
    )
    lengths = (700, 500, 90)
    first, second = cut(0, 700, [350])
    chunks = (Chunk((first,)), Chunk((second, *whole(lengths, [2]))), Chunk(whole(lengths, [1])))
    bench = build_stage(config, layers, stage)
    executor = Executor(bench, Alone(), Parameters(bench, dtype), loss_block_tokens=64)
    batch = Batch.from_tokens([torch.randint(0, 2000, (length,)) for length in lengths])
    ratios = []
    for recompute in (0, 1, 2):
        schedule = "zero-bubble" if split else "1f1b"
        replica = build_replica((Pipeline(chunks),), 3, schedule=schedule, recompute=[[recompute] * 3] * 3)
        with MemoryMeter() as meter:
            executor.step(replica, batch)
        assert meter.current == 0
        ratios.append(replica_peaks(replica, cost)[stage] / meter.peak)
    assert min(ratios) >= 0.99
    assert max(ratios) <= 1.12


def test_the_gradient_of_a_large_embedding_is_counted() -> None:
    step, formula = prepare(slices=8, recompute=2, config=LlamaConfig(**(CONFIG.to_dict() | {"vocab_size": 8000})))
    with MemoryMeter() as meter:
        step()
    assert meter.peak > 8000 * 64 * 4
    assert 0.98 <= formula / meter.peak <= 1.06


def test_a_step_agrees_with_the_allocator() -> None:
    step, _ = prepare(slices=1, recompute=0)
    with MemoryMeter() as meter:
        step()
    assert meter.peak <= allocator_peak(step) <= 1.05 * meter.peak


@pytest.mark.parametrize("block", [16, 64, 512])
def test_the_head_in_bfloat16_holds_what_is_promised(block: int) -> None:
    """Its weight's gradient passes through a block in bfloat16 on its way into float32: more than the logits, where these are few."""
    config = LlamaConfig(**(CONFIG.to_dict() | {"vocab_size": 8000, "hidden_size": 256, "num_attention_heads": 4}))
    known = footprint(config, torch.bfloat16)
    cost = flop_cost(known.shape, (1, 1), element_bytes=2, states=[0, 0], block_tokens=block, layers=known.layers)
    chunks = (Chunk(whole((300,), [0])),)
    replica = build_replica((Pipeline(chunks),), 2)
    stage = build_stage(config, (1, 1), 1)
    executor = Executor(stage, Alone(), Parameters(stage, torch.bfloat16), loss_block_tokens=block)
    batch = Batch.from_tokens([torch.arange(300)])
    with MemoryMeter() as meter:
        executor.step(replica, batch)
    assert 0.99 <= replica_peaks(replica, cost)[1] / meter.peak <= 1.08
