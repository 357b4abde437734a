"""A Hugging Face causal language model cut into pipeline stages.

A stage is the model itself with the parts of other stages taken out: parameter names stay Hugging Face's, and the model's own
forward runs, with its own rotary embeddings and habits per layer type.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from infinipipe.model.attention import IMPLEMENTATION, ChunkContext
from infinipipe.model.config import UnsupportedModelError
from infinipipe.model.linear import AccumulatingLinear
from infinipipe.model.loss import LossHead, LossTarget
from infinipipe.model.weights import Checkpoint, meta_model, name_of


class _Absent(nn.Module):
    """Stands where a module of another stage was, and passes its first argument through."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def absent_like(module: nn.Module) -> _Absent:
    """An absent module with the plain attributes that a model's forward may read from the original, such as its type."""
    absent = _Absent()
    for name, value in vars(module).items():
        if not name.startswith("_") and isinstance(value, (str, int, float, bool)):
            setattr(absent, name, value)
    return absent


def _recompute(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


@dataclass(frozen=True)
class SharedWeight:
    """A weight that embedding and head share though they lie on different stages, of which this one has a copy.

    The stage with the embedding owns it: there it is counted, saved and exported, under the embedding's name. Both add up their
    gradients' sum (:func:`infinipipe.runtime.sync_shared_gradients`), so that the copies stay equal.

    Attributes:
        name: of this stage's copy.
        stored_as: the embedding's name.
    """

    name: str
    stored_as: str

    @property
    def is_owned(self) -> bool:
        return self.name == self.stored_as


class Stage(nn.Module):
    """One pipeline stage: some parts of the model, each a run of decoder layers, the first part with the embedding, the last with
    final norm and head.

    Attributes:
        model: the trimmed Hugging Face model; its parameters keep their names.
        stage_layers: layers of every part of the model.
        parts: those of this stage.
        dtype, device: of the parameters, and of the hidden states between parts.
        shared: this stage's copy of a weight that another stage has too, if there is one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stage_layers: tuple[int, ...],
        parts: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        shared: SharedWeight | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.device = device
        self.stage_layers = stage_layers
        self.parts = parts
        self.shared = shared
        modules = {part: self._modules_of(part) for part in parts}
        self._layers = tuple(layer for part in parts for layer in self.layers_of(part))
        self._views: dict[int, dict[str, nn.Module]] = modules if len(parts) > 1 else {}
        for layer in self._layers:
            layer._gradient_checkpointing_func = _recompute
            AccumulatingLinear.convert(layer)

    def _modules_of(self, part: int) -> dict[str, nn.Module]:
        """What the base model is to have as ``layers`` and ``norm`` while a part computes: those of other parts left out."""
        base, own = self.model.base_model, self.layer_range(part)
        layers = [layer if number in own else absent_like(layer) for number, layer in enumerate(base.layers)]
        return {"layers": nn.ModuleList(layers), "norm": base.norm if part == self.num_parts - 1 else _Absent()}

    @property
    def num_parts(self) -> int:
        return len(self.stage_layers)

    @property
    def has_embedding(self) -> bool:
        return 0 in self.parts

    @property
    def has_head(self) -> bool:
        return self.num_parts - 1 in self.parts

    @property
    def shares_within(self) -> bool:
        """Whether this stage has both embedding and head, of one weight: then that is one parameter, with one gradient."""
        return self.has_embedding and self.has_head and bool(self.model.config.tie_word_embeddings)

    @property
    def hidden_size(self) -> int:
        return self.model.config.hidden_size

    @property
    def head(self) -> LossHead:
        """Output projection and loss; where the last part is only."""
        assert self.has_head
        return self.model.get_output_embeddings()

    def layer_range(self, part: int) -> range:
        """Numbers of a part's layers in the model."""
        first = sum(self.stage_layers[:part])
        return range(first, first + self.stage_layers[part])

    @property
    def layers(self) -> tuple[GradientCheckpointingLayer, ...]:
        """The decoder layers of this stage, part after part."""
        return self._layers

    def layers_of(self, part: int) -> tuple[GradientCheckpointingLayer, ...]:
        """The decoder layers of a part of this stage."""
        layers = self.model.base_model.layers
        return tuple(layers[number] for number in self.layer_range(part))

    def owns(self, name: str) -> bool:
        """Whether the parameter of that name is to be counted and saved here: all but a copy of another stage's weight."""
        return self.shared is None or self.shared.is_owned or name != self.shared.name

    def stored_name(self, name: str) -> str:
        """The name under which a parameter of this stage is known to all: its own, but for a copy of another stage's weight."""
        return name if self.owns(name) or self.shared is None else self.shared.stored_as

    def forward(
        self,
        inputs: Tensor,
        context: ChunkContext,
        part: int | None = None,
        recompute: int = 0,
        target: LossTarget | None = None,
    ) -> Tensor:
        """Hidden states of a chunk, (1, local tokens, hidden size), after a part; after the last part its loss, a scalar.

        ``inputs`` is (local tokens,) int64 at the first part, else the part before's (local tokens, hidden size). ``part`` may be
        left out where the stage has one. Its first ``recompute`` layers keep only their input for backward. The last part, and no
        other, needs a ``target``.
        """
        if part is None:
            (part,) = self.parts
        for number, layer in enumerate(self.layers_of(part)):
            layer.gradient_checkpointing = number < recompute
        name = "input_ids" if part == 0 else "inputs_embeds"
        with self._only(part):
            output = self.model.base_model(
                **{name: inputs.unsqueeze(0)},
                position_ids=context.positions(inputs.device),
                use_cache=False,
                chunk_context=context,
            )
        if part < self.num_parts - 1:
            # Without a layer the output is a view of the input, which FSDP's hooks on it do not survive.
            return output.last_hidden_state if self.stage_layers[part] else output.last_hidden_state.clone()
        assert target is not None
        return self.head(output.last_hidden_state.squeeze(0), target)

    @contextmanager
    def _only(self, part: int) -> Iterator[None]:
        """Within the context, the base model has no layers and norm but a part's; its parameters' names need them all otherwise."""
        base = self.model.base_model
        whole = {name: base._modules[name] for name in self._views.get(part, ())}
        base._modules.update(self._views.get(part, {}))
        try:
            yield
        finally:
            base._modules.update(whole)


def build_stage(
    config: PretrainedConfig,
    stage_layers: tuple[int, ...],
    parts: int | Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    checkpoint: Checkpoint | str | Path | None = None,
) -> Stage:
    """Build the stage that has ``parts`` of the model, one or several, holding no more than its own tensors at any time.

    ``stage_layers`` are the layers of every part. Weights come from ``checkpoint``, a directory of safetensors in Hugging Face form,
    or else from ``seed``, the same whatever the parts. Parameters get ``dtype``; buffers, such as rotary frequencies, keep
    their own. Raises ``UnsupportedModelError`` for an architecture without the usual parts, ``ValueError`` for a checkpoint that
    lacks some.
    """
    own = (parts,) if isinstance(parts, int) else tuple(parts)
    model = meta_model(config, attn_implementation=IMPLEMENTATION)
    check_parts(model, config)
    embedding = model.get_input_embeddings()
    embedding_name, head_name = (
        f"{name_of(model, module)}.weight" for module in (embedding, model.get_output_embeddings())
    )
    has_embedding, has_head = 0 in own, len(stage_layers) - 1 in own
    _trim(model, stage_layers, own)
    _initialize(model, seed)
    shared = None
    if config.tie_word_embeddings and has_embedding != has_head:
        shared = SharedWeight(embedding_name if has_embedding else head_name, embedding_name)
        if has_head:
            _initialize_module(model, embedding_name.removesuffix(".weight"), embedding, seed, {})
            model.get_output_embeddings().weight = embedding.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    if has_head:
        model.set_output_embeddings(LossHead(model.get_output_embeddings()))
    stage = Stage(model, stage_layers, own, dtype, torch.device(device), shared)
    if checkpoint is not None:
        given = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint, config)
        given.read_into(model)
    stage.to(device)
    stage.train()
    return stage


def check_parts(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """The base model must consist of embedding, layers and norm: what else has parameters would be on every stage.

    Raises ``UnsupportedModelError``.
    """
    base, head = model.base_model, model.get_output_embeddings()
    layers, norm = getattr(base, "layers", None), getattr(base, "norm", None)
    if not isinstance(layers, nn.ModuleList) or norm is None or head is None or base is model:
        raise UnsupportedModelError(f"{config.model_type} has no embedding, layers, norm and head of the usual names")
    if not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        raise UnsupportedModelError(f"{config.model_type} has layers that cannot be recomputed one by one")
    known = {id(p) for module in (model.get_input_embeddings(), layers, norm, head) for p in module.parameters()}
    extra = [name for name, p in model.named_parameters() if id(p) not in known]
    if extra:
        raise UnsupportedModelError(
            f"{config.model_type} has the parameter {extra[0]} outside embedding, layers, norm and head"
        )


def _trim(model: PreTrainedModel, stage_layers: tuple[int, ...], parts: tuple[int, ...]) -> None:
    """Take out what belongs to parts of other stages."""
    base = model.base_model
    first = 0
    for part, count in enumerate(stage_layers):
        if part not in parts:
            for number in range(first, first + count):
                base.layers[number] = absent_like(base.layers[number])
        first += count
    if len(stage_layers) - 1 not in parts:
        base.norm = _Absent()
        model.set_output_embeddings(_Absent())
    if 0 not in parts:
        model.set_input_embeddings(_Absent())


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _initialize(model: PreTrainedModel, seed: int) -> None:
    """Give every module real tensors, in float32, with the model's own initialisation."""
    shared: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        _initialize_module(model, name, module, seed, shared)


def _initialize_module(
    model: PreTrainedModel, name: str, module: nn.Module, seed: int, shared: dict[int, nn.Parameter]
) -> None:
    """Initialise a module's own tensors, seeded by its name; ``shared`` maps meta parameters met before to real ones."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        if id(parameter) in shared:
            setattr(module, key, shared[id(parameter)])
            return
        shared[id(parameter)] = nn.Parameter(torch.empty(parameter.shape))
        setattr(module, key, shared[id(parameter)])
    for key, buffer in module.named_buffers(recurse=False):
        module._buffers[key] = torch.full(buffer.shape, float("nan")) if buffer.is_floating_point() else buffer
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_seed_of(seed, name))
        model._init_weights(module)
    _check_buffers(name, module)


def _check_buffers(name: str, module: nn.Module) -> None:
    """Non-persistent buffers are in no checkpoint: those that initialisation leaves open have a twin, or are refused."""
    for key, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta or (buffer.is_floating_point() and buffer.isnan().any()):
            twin = module._buffers.get(key.replace("original_", ""))
            if twin is None or twin.is_meta or twin.isnan().any():
                raise UnsupportedModelError(f"the buffer {name}.{key} cannot be rebuilt from the configuration")
            module._buffers[key] = twin.clone()
