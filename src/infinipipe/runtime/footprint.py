"""What a model's layers hold, need and compute, read from the model itself: its own code runs on tensors without storage.

Parameters are counted where they are, experts that a token does not visit among them; operations are those that a token costs;
bytes are those of the storages that the code of a step allocates, metered as in a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from infinipipe.cost import MemoryUse, ModelShape, WorkingSet
from infinipipe.model import (
    ChunkContext,
    KVStore,
    Product,
    Stage,
    UnsupportedModelError,
    WeightGradients,
    check_sizes,
    settle,
)
from infinipipe.model.attention import IMPLEMENTATION
from infinipipe.model.backends import CpuAttention, Segments, register_backend
from infinipipe.model.stage import absent_like, check_parts
from infinipipe.model.weights import meta_model
from infinipipe.plan import Chunk, cut
from infinipipe.runtime.memory import MemoryMeter
from infinipipe.runtime.received import Received

FEW, MANY = 8, 2**20
"""Tokens of a chunk whose operations are counted, and of one so large that all but what depends on tokens is nothing."""
META = torch.device("meta")


@dataclass(frozen=True)
class Footprint:
    """What planning needs to know of a model.

    Attributes:
        shape: its sizes.
        layers: bytes of activations of its layers and last norm, in the dtype that was asked for; the most of any kind of layer.
    """

    shape: ModelShape
    layers: MemoryUse


def footprint(config: PretrainedConfig, dtype: torch.dtype) -> Footprint:
    """Read a model's footprint when it computes in ``dtype``.

    Raises ``UnsupportedModelError`` for impossible sizes, and for a model that cannot be cut into stages, or whose layers do not run without data.
    """
    check_sizes(config)
    key = config.to_json_string(use_diff=False), dtype
    if key not in _known:
        _known[key] = _read(config, dtype)
    return _known[key]


_known: dict[tuple[str, torch.dtype], Footprint] = {}
"""Footprints by configuration, since each is asked for several times."""


def _read(config: PretrainedConfig, dtype: torch.dtype) -> Footprint:
    trace = _Trace(config, dtype)
    try:
        return trace.footprint()
    except (RuntimeError, NotImplementedError) as error:
        message = str(error).strip().split("\n")[0]
        raise UnsupportedModelError(
            f"the layers of {config.model_type} do not run on tensors without data, so that what they need is not known: {message}"
        ) from None


class _Seen:
    """What the attention of the layers under trace meets.

    Attributes:
        windows: of every attention that was set up; 0 for none.
        heads: query heads, K/V heads and head size of the last one.
        backward: called when the backward of an attention begins.
    """

    def __init__(self) -> None:
        self.windows: list[int] = []
        self.heads: tuple[int, int, int] = (0, 0, 0)
        self.backward: Callable[[], None] = lambda: None


_seen = _Seen()


@register_backend("meta")
@dataclass(frozen=True)
class MetaAttention(CpuAttention):
    """Allocates what the CPU's attention does where no window limits it, and computes nothing."""

    def __post_init__(self) -> None:
        _seen.windows.append(self.window or 0)
        object.__setattr__(self, "window", None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        _seen.heads = (q.shape[1], k.shape[1], q.shape[2])
        return super().forward(q, k, v, segments)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        _seen.backward()
        return super().backward(grad, q, k, v, out, lse, segments)


@dataclass(frozen=True)
class _Bytes:
    """What a run of layers holds and needs.

    Attributes:
        held: after the forward, what lies in the store of keys and values excepted.
        shared: of it, the input itself.
        forward: the peak of the forward beyond that.
        before, after: the peaks of the backward until its first attention, and from then on, beyond what was held.
        operands: what waits for the weight gradients after a first half.
        weights: the peak of the second half beyond them.
    """

    held: int
    shared: int
    forward: int
    before: int
    after: int
    operands: int = 0
    weights: int = 0


class _Trace:
    """A model on the meta device, of which runs of layers are traced."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        count = config.num_hidden_layers
        model = meta_model(_two_layers_at_least(config), attn_implementation=IMPLEMENTATION)
        check_parts(model, config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
        self.config, self.dtype, self.model, self.base = config, dtype, model, model.base_model
        self.layers: tuple[nn.Module, ...] = tuple(self.base.layers)
        self.count = count
        self.norm: nn.Module = self.base.norm
        self.hidden = int(model.get_input_embeddings().weight.shape[1])
        # It makes of the layers what they are in a run.
        Stage(model, (len(self.layers),), (0,), dtype, META)
        wide = torch.promote_types(dtype, torch.float32)
        self.wide_bytes = wide.itemsize
        buffers = {id(p): torch.empty(p.shape, dtype=wide, device=META) for p in model.parameters()}
        self.gradients = WeightGradients(lambda weight: buffers[id(weight)])
        self.gradients.attach(model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)

    def footprint(self) -> Footprint:
        """The model's sizes, and the most that a layer of any kind holds and needs."""
        kinds = {_kind(layer): number for number, layer in reversed(list(enumerate(self.layers)))}
        with _GroupedProducts():
            work = {kind: self._operations(number) // (2 * FEW) for kind, number in kinds.items()}
            return Footprint(self._shape(work), _most([self._memory(number) for number in kinds.values()]))

    def _operations(self, number: int) -> int:
        """Of a layer with ``FEW`` tokens, those of its attention excepted."""
        counter = FlopCounterMode(display=False, custom_mapping=_MORE_OPERATIONS)
        with torch.no_grad(), counter:
            self._forward([number], self._rows(FEW), Chunk(cut(0, FEW, [])), KVStore(), again=False)
        return counter.get_total_flops()

    def _shape(self, work: Mapping[tuple[object, ...], int]) -> ModelShape:
        """The model's sizes; windows and operations as a forward meets them."""
        _seen.windows.clear()
        with torch.no_grad():
            self._forward(range(len(self.layers)), self._rows(1), Chunk(cut(0, 1, [])), KVStore(), again=False)
        windows = tuple(_seen.windows[: self.count])
        if len(_seen.windows) != len(self.layers):
            raise UnsupportedModelError(
                f"{self.config.model_type} has {len(self.layers)} layers, but {len(_seen.windows)} of them attend to keys and values"
            )
        heads, kv_heads, head_dim = _seen.heads
        return ModelShape(
            layers=self.count,
            hidden=self.hidden,
            intermediate=int(getattr(self.config, "intermediate_size", None) or 0),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=int(self.model.get_input_embeddings().weight.shape[0]),
            tied=bool(self.config.tie_word_embeddings),
            windows=windows if any(windows) else (),
            layer_parameters=tuple(sum(p.numel() for p in layer.parameters()) for layer in self.layers[: self.count]),
            layer_work=tuple(work[_kind(layer)] for layer in self.layers[: self.count]),
        )

    def _rows(self, tokens: int) -> Tensor:
        return torch.empty(1, tokens, self.hidden, dtype=self.dtype, device=META)

    def _forward(self, numbers: Sequence[int], inputs: Tensor, chunk: Chunk, store: KVStore, *, again: bool) -> Tensor:
        """The output of the layers at those places, within the base model's own forward."""
        run: list[nn.Module] = list(map(absent_like, self.layers))
        for place, number in zip(_places(numbers, len(run)), numbers, strict=True):
            layer = run[place] = self.layers[number]
            assert isinstance(layer, GradientCheckpointingLayer)
            layer.gradient_checkpointing = again
        context = ChunkContext(chunk, store)
        with _replaced(self.base, layers=nn.ModuleList(run), norm=absent_like(self.norm)):
            output = self.base(
                inputs_embeds=inputs,
                position_ids=context.positions(META),
                use_cache=False,
                chunk_context=context,
            )
        result: Tensor = output.last_hidden_state
        return result

    def _memory(self, number: int) -> MemoryUse:
        """Bytes of a layer, from runs with few and many tokens, cut and not."""
        many, more = MANY, 2 * MANY
        one, two = self._run(number, more), self._run(number, more, count=2)
        half_as_many = self._run(number, many)
        again, again_twice = (self._run(number, more, again=True, count=count) for count in (1, 2))
        near, far = (self._run(number, many, context=context) for context in (many, 2 * many))
        first_half, first_near, first_far = (
            self._run(number, more, splits=True),
            *(self._run(number, many, context=context, splits=True) for context in (many, 2 * many)),
        )
        first_as_many = self._run(number, many, splits=True)
        tiny = [self._run(number, tokens) for tokens in (1, 2)]
        first_tiny = [self._run(number, tokens, splits=True) for tokens in (1, 2)]
        kv, dkv = self._kv_bytes(number)
        layer = (two.held - one.held) / more
        chunk = (2 * one.held - two.held) / more
        return MemoryUse(
            layer=max(layer - kv, near.held / many - chunk),
            layer_kv=kv,
            layer_input=(again_twice.held - again.held) / more,
            kv=kv,
            dkv=dkv,
            message=self.hidden * self.dtype.itemsize,
            chunk=chunk,
            head=self._norm_bytes(),
            forward_kept=two.forward / more,
            forward_recomputed=again_twice.forward / more,
            layer_shared=one.shared / more,
            backward=_working_set(tiny, half_as_many, one, near, far),
            backward_input=_working_set(first_tiny, first_as_many, first_half, first_near, first_far),
            weight_operands=first_half.operands / more,
            weight_block=first_tiny[0].weights,
        )

    def _run(
        self, number: int, tokens: int, *, count: int = 1, context: int = 0, again: bool = False, splits: bool = False
    ) -> _Bytes:
        """One layer, or ``count`` times the same, on a slice of ``tokens`` tokens, behind a context or else a whole sequence.

        Behind a context, one more token follows, whose backward has been: it allocates what gradients wait in.
        """
        pieces = cut(0, context + tokens + 1, [context, context + tokens]) if context else cut(0, tokens, [])
        numbers, store = [number] * count, KVStore()
        chunk = Chunk((pieces[len(pieces) // 2],))
        with MemoryMeter(META.type) as meter:
            if context:
                with torch.no_grad():
                    for piece in pieces[:-1]:
                        self._forward(numbers, self._rows(piece.num_tokens), Chunk((piece,)), store, again=False)
                rows = Received().of(self._rows(1))
                self._forward(numbers, rows, Chunk((pieces[-1],)), store, again=False).backward(self._rows(1))
                del rows
            stored = meter.current
            meter.reset_peak()
            received = Received()
            rows = received.of(self._rows(tokens))
            storage = rows.untyped_storage()._cdata
            output = self._forward(numbers, rows, chunk, store, again=again)
            root, forward = get_gradient_edge(output), meter.peak - stored
            del output, rows
            held, shared = meter.current - stored, meter.size_of(storage)
            gradient = self._rows(tokens)
            base, before = meter.current, []
            meter.reset_peak()

            def attention_begins() -> None:
                before.append(meter.peak - base)
                meter.reset_peak()

            _seen.backward = attention_begins
            products: list[Product] = []
            if splits:
                with self.gradients.putting_off() as products:
                    torch.autograd.backward(root, gradient)
            else:
                torch.autograd.backward(root, gradient)
            _seen.backward = _nothing
            after = meter.peak - base
            store.clear()
            del gradient, root, received
            operands = meter.current
            meter.reset_peak()
            settle(products)
        return _Bytes(held, shared, forward - held, before[0], after, operands, meter.peak - operands)

    def _kv_bytes(self, number: int) -> tuple[int, int]:
        """Bytes of a token's keys and values in the store, and of their gradients."""
        store, tokens = KVStore(), 4
        with torch.no_grad():
            first, _ = cut(0, tokens, [1])
            self._forward([number], self._rows(1), Chunk((first,)), store, again=False)
        elements = store.elements // tokens
        return elements * self.dtype.itemsize, elements * self.wide_bytes

    def _norm_bytes(self) -> int:
        """What the last norm saves of a token."""
        tokens = 16
        with MemoryMeter(META.type) as meter:
            rows = Received().of(self._rows(tokens))
            output = self.norm(rows)
            edge = get_gradient_edge(output)
            del rows, output
            held = meter.current
            del edge
        return held // tokens


def _places(numbers: Sequence[int], count: int) -> Sequence[int]:
    """Places among ``count`` for layers to run: their own, but side by side for one that runs twice."""
    twice = len(numbers) > len(set(numbers))
    return numbers if not twice else [min(numbers[0], count - len(numbers)) + i for i in range(len(numbers))]


def _nothing() -> None: ...


def _two_layers_at_least(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration, with a second layer like the first if it has one: what two hold beyond one tells a layer from what a part holds."""
    if config.num_hidden_layers > 1:
        return config
    types = getattr(config, "layer_types", None)
    fields = config.to_dict() | {"num_hidden_layers": 2} | ({"layer_types": list(types) * 2} if types else {})
    return type(config).from_dict(fields)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Layers of equal modules, and parameters of equal sizes, hold and need the same."""
    modules = tuple((name, type(module).__name__) for name, module in layer.named_modules())
    return modules, tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


def _working_set(tiny: Sequence[_Bytes], half: _Bytes, whole: _Bytes, near: _Bytes, far: _Bytes) -> WorkingSet:
    """From runs of 1 and 2 tokens, of ``MANY`` and twice as many, and of ``MANY`` behind a context of as many and twice as many."""
    beside = tiny[1].before - tiny[0].before
    context = (far.after - near.after) / MANY
    return WorkingSet(
        token=(whole.before - half.before) / MANY,
        beside=beside,
        block=tiny[0].before - beside,
        attention=max((whole.after - half.after) / MANY, near.after / MANY - 2 * context),
        context=context,
    )


def _most(uses: Sequence[MemoryUse]) -> MemoryUse:
    """The most of every figure; of the input that a layer holds in any case the least, since that is what need not be held twice."""
    pairs: dict[str, Any] = {}
    for each in fields(MemoryUse):
        values = [getattr(use, each.name) for use in uses]
        if isinstance(values[0], WorkingSet):
            names = [own.name for own in fields(WorkingSet)]
            pairs[each.name] = WorkingSet(**{name: max(getattr(value, name) for value in values) for name in names})
        else:
            pairs[each.name] = min(values) if each.name == "layer_shared" else max(values)
    return MemoryUse(**pairs)


@contextmanager
def _replaced(module: nn.Module, **children: nn.Module) -> Iterator[None]:
    """Within the context, the module has other children of those names."""
    before = {name: module._modules[name] for name in children}
    module._modules.update(children)
    try:
        yield
    finally:
        module._modules.update(before)


class _GroupedProducts(TorchDispatchMode):
    """Products of experts in any dtype: on the meta device PyTorch knows them in bfloat16 only."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        rows, matrices, *more = args
        offsets = more[0] if more else (kwargs or {})["offs"]
        groups = (len(offsets),) if rows.dim() == matrices.dim() == 2 else ()
        return rows.new_empty((*groups, rows.shape[-2], matrices.shape[-1]))


def _grouped_operations(rows: Sequence[int], matrices: Sequence[int], *_: Any, **__: Any) -> int:
    """Of rows (rows, inputs), each multiplied with one of the matrices (matrices, inputs, outputs)."""
    return 2 * rows[0] * rows[1] * matrices[-1]


_MORE_OPERATIONS = {torch.ops.aten._grouped_mm: _grouped_operations}
"""Operations that PyTorch's counter does not know: the products of experts."""
