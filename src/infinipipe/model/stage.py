"""A Hugging Face causal language model cut into pipeline stages.

A stage is the model itself with the parts of other stages taken out: parameter names stay Hugging Face's, and the model's own
forward runs, with its own rotary embeddings and habits per layer type.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from infinipipe.model.attention import IMPLEMENTATION, ChunkContext
from infinipipe.model.config import UnsupportedModelError
from infinipipe.model.loss import LossHead, LossTarget
from infinipipe.model.weights import read_tensors


class _Absent(nn.Module):
    """Stands where a module of another stage was, and passes its first argument through."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def _absent_like(module: nn.Module) -> _Absent:
    """An absent module with the plain attributes that a model's forward may read from the original, such as its type."""
    absent = _Absent()
    for name, value in vars(module).items():
        if not name.startswith("_") and isinstance(value, (str, int, float, bool)):
            setattr(absent, name, value)
    return absent


def _recompute(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class Stage(nn.Module):
    """One pipeline stage: decoder layers ``[first_layer, first_layer + num_layers)``, the first with the embedding, the
    last with final norm and head.

    Attributes:
        model: the trimmed Hugging Face model; its parameters keep their names.
        index: number of the stage, from 0.
        stage_layers: layers of every stage.
        dtype, device: of the parameters, and of the hidden states between stages.
        tied: whether the head's weight is the embedding's, on whatever stages they are.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stage_layers: tuple[int, ...],
        index: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.device = device
        self.stage_layers = stage_layers
        self.index = index
        self.tied = bool(model.config.tie_word_embeddings)
        self.first_layer = sum(stage_layers[:index])
        layers = model.base_model.layers[self.first_layer : self.first_layer + stage_layers[index]]
        self._layers: tuple[GradientCheckpointingLayer, ...] = tuple(layers)
        for layer in self._layers:
            layer._gradient_checkpointing_func = _recompute

    @property
    def num_stages(self) -> int:
        return len(self.stage_layers)

    @property
    def num_layers(self) -> int:
        return self.stage_layers[self.index]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def hidden_size(self) -> int:
        return self.model.config.hidden_size

    @property
    def head(self) -> LossHead:
        """Output projection and loss; on the last stage only."""
        assert self.is_last
        return self.model.get_output_embeddings()

    @property
    def layers(self) -> tuple[GradientCheckpointingLayer, ...]:
        """The decoder layers of this stage."""
        return self._layers

    @property
    def tied_parameter(self) -> nn.Parameter | None:
        """This stage's copy of a weight that embedding and head share across stages, if it has one."""
        if not self.tied or self.num_stages == 1:
            return None
        if not (self.is_first or self.is_last):
            return None
        module = self.model.get_input_embeddings() if self.is_first else self.head
        assert isinstance(module.weight, nn.Parameter)
        return module.weight

    def forward(
        self, inputs: Tensor, context: ChunkContext, recompute: int = 0, target: LossTarget | None = None
    ) -> Tensor:
        """Hidden states of a chunk, (1, local tokens, hidden size), after this stage; on the last stage its loss, a scalar.

        ``inputs`` is (local tokens,) int64 on the first stage, else the previous stage's (local tokens, hidden size). The
        first ``recompute`` layers keep only their input for backward. The last stage, and no other, needs a ``target``.
        """
        for number, layer in enumerate(self._layers):
            layer.gradient_checkpointing = number < recompute
        name = "input_ids" if self.is_first else "inputs_embeds"
        output = self.model.base_model(
            **{name: inputs.unsqueeze(0)},
            position_ids=context.positions(inputs.device),
            use_cache=False,
            chunk_context=context,
        )
        if not self.is_last:
            return output.last_hidden_state
        assert target is not None
        return self.head(output.last_hidden_state.squeeze(0), target)


def build_stage(
    config: PretrainedConfig,
    stage_layers: tuple[int, ...],
    index: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    checkpoint: str | Path | None = None,
) -> Stage:
    """Build stage ``index``, holding no more than its own tensors at any time.

    Weights come from ``checkpoint``, a directory of safetensors in Hugging Face form, or else from ``seed``, the same
    whatever the number of stages. Parameters get ``dtype``; buffers, such as rotary frequencies, keep their own. Raises
    ``UnsupportedModelError`` for an architecture without the usual parts, ``ValueError`` for a checkpoint that lacks some.
    """
    config = copy.deepcopy(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{config.model_type} cannot be built as a causal language model: {error}"
        ) from None
    _check_parts(model, config)
    embedding = model.get_input_embeddings()
    embedding_name, head_name = _name_of(model, embedding), _name_of(model, model.get_output_embeddings())
    _trim(model, stage_layers, index)
    _initialize(model, seed)
    if config.tie_word_embeddings and 0 < index == len(stage_layers) - 1:
        _initialize_module(model, embedding_name, embedding, seed, {})
        model.get_output_embeddings().weight = embedding.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    if index == len(stage_layers) - 1:
        model.set_output_embeddings(LossHead(model.get_output_embeddings()))
    stage = Stage(model, stage_layers, index, dtype, torch.device(device))
    if checkpoint is not None:
        aliases = {f"{head_name}.weight": f"{embedding_name}.weight"} if stage.tied else None
        read_tensors(model, Path(checkpoint), aliases=aliases)
    stage.to(device)
    stage.train()
    return stage


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, candidate in model.named_modules() if candidate is module)


def _check_parts(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """The base model must consist of embedding, layers and norm: what else has parameters would be on every stage."""
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


def _trim(model: PreTrainedModel, stage_layers: tuple[int, ...], index: int) -> None:
    first, last = index == 0, index == len(stage_layers) - 1
    start = sum(stage_layers[:index])
    base = model.base_model
    for number, layer in enumerate(base.layers):
        if not start <= number < start + stage_layers[index]:
            base.layers[number] = _absent_like(layer)
    if not last:
        base.norm = _Absent()
        model.set_output_embeddings(_Absent())
    if not first:
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
