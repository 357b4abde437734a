"""FSDP inside a stage, tamed for pipelines: gathered once or per use, reduced once per step, summed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from infinipipe.model import Stage
from infinipipe.runtime.parameters import Parameters

GatherPolicy = Literal["keep", "release"]
"""``keep``: a parameter, once gathered, stays until the step's last backward; ``release``: it goes after each use."""


class ShardedParameters(Parameters):
    """Parameters of a stage sharded over its sequence-parallel processes and replicated over the replicas.

    Master weights are the shards, in float32 (or float64); lower precisions compute with copies that the gathering rounds.
    Gradients accumulate unsharded, in float32 at least, over the chunks of a step, and its last backward sums them over
    all processes of the mesh and scatters them. Every process must therefore run the same number of steps.

    Args:
        stage: the stage, with parameters in master precision.
        mesh: one dimension to shard over, or two: to replicate and to shard over.
        dtype: the dtype to compute in.
        policy: how long gathered parameters stay.
    """

    is_sharded = True

    def __init__(self, stage: Stage, mesh: DeviceMesh, *, dtype: torch.dtype, policy: GatherPolicy = "keep") -> None:
        self._stage = stage
        self._release = policy == "release"
        self._deliver = False
        self._head_gradients: dict[str, Tensor] = {}
        wide = torch.promote_types(dtype, torch.float32)
        for name, parameter in stage.model.named_parameters():
            if parameter.dtype != wide:
                raise ValueError(
                    f"the master weights of sharded stages must be {wide}, but {name} is {parameter.dtype}"
                )
        precision = MixedPrecisionPolicy(cast_forward_inputs=False)
        if dtype != wide:
            precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, cast_forward_inputs=False)
        for module in (*_units(stage), stage):
            fully_shard(module, mesh=mesh, reshard_after_forward=self._release, mp_policy=precision)
        stage.dtype = dtype
        self._modules = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        self._set_prefetch()

    def _set_prefetch(self) -> None:
        """While a part computes, gather the one that is next: left to itself, FSDP takes the order of several chunks for one."""
        order = [unit for unit in _units(self._stage) if isinstance(unit, FSDPModule)]
        for before, after in itertools.pairwise(order):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        for module in self._modules:
            if module not in order[1:]:
                module.set_modules_to_backward_prefetch([module])

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._stage.model.named_parameters()

    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """The unsharded buffer of one of the head's gathered parameters."""
        return self._head_gradients[self._head_name(parameter)]

    def hand_over(self, parameter: nn.Parameter) -> Tensor | None:
        if not self._deliver:
            return None
        return self._head_gradients[self._head_name(parameter)].to(parameter.dtype, copy=True)

    def _head_name(self, parameter: nn.Parameter) -> str:
        return next(name for name, own in self._stage.head.named_parameters() if own is parameter)

    def begin_step(self) -> None:
        self._deliver = False
        if self._stage.is_last:
            for name, parameter in self._stage.head.named_parameters():
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self._head_gradients[name] = torch.zeros(parameter.shape, dtype=wide, device=self._stage.device)
        self._set_sync(last=False)

    def begin_last_backward(self) -> None:
        self._deliver = True
        self._set_sync(last=True)

    def _set_sync(self, *, last: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last or self._release, recurse=False)
            module.set_is_last_backward(last)

    def end_forwards(self) -> None:
        for module in self._modules:
            module.reshard()

    def zero_grad(self) -> None:
        for _, parameter in self.named():
            parameter.grad = None

    def publish(self) -> None:
        """Let go of the step's buffers; the next gathering copies the masters."""
        self._head_gradients.clear()


def _units(stage: Stage) -> list[nn.Module]:
    """What is gathered together, in order: the embedding, each layer, the head; a weight tied within the stage goes with the rest."""
    units: list[nn.Module] = list(stage.layers)
    if not (stage.tied and stage.num_stages == 1):
        if stage.is_first:
            units.insert(0, stage.model.get_input_embeddings())
        if stage.is_last:
            units.append(stage.head)
    return units


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
