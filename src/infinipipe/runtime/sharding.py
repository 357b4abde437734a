"""FSDP inside a stage, tamed for pipelines: gathered once or per use, reduced once per step or as soon as they are there, summed.

FSDP only gathers here. Gradients accumulate over all chunks of a step, those of linear layers perhaps long after the backward that
FSDP sees: unsharded, summed and scattered after the step's last action, or as shards, to which each unit's gradients of a chunk are
added when the next unit's come.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from infinipipe.cost import GatherPolicy, GradientPolicy
from infinipipe.model import Stage
from infinipipe.runtime.parameters import Parameters


class ShardedParameters(Parameters):
    """Parameters of a stage sharded over its sequence-parallel processes and replicated over the replicas.

    Master weights are the shards, in float32 (or float64); lower precisions compute with copies that the gathering rounds.
    Gradients accumulate in float32 at least over the chunks of a step. ``whole``, they do so unsharded, and the step's end sums them
    over all processes of the mesh and scatters them. ``sharded``, one unit's are whole at a time: as soon as another's come, they
    are summed over the processes that share the stage and added to the shards, which the step's end sums over the replicas. Every
    process must therefore run the same number of steps, and the processes that share a stage the same actions.

    Args:
        stage: the stage, with parameters in master precision.
        mesh: one dimension to shard over, or two: to replicate and to shard over.
        dtype: the dtype to compute in.
        policy: how long gathered parameters stay.
        gradients: how gradients accumulate.
    """

    def __init__(
        self,
        stage: Stage,
        mesh: DeviceMesh,
        *,
        dtype: torch.dtype,
        policy: GatherPolicy = "keep",
        gradients: GradientPolicy = "whole",
    ) -> None:
        self._stage = stage
        self._shards = mesh.get_group("sequence")
        self._copies_of = mesh.get_group("replica") if mesh.ndim > 1 else None
        self._wide = torch.promote_types(dtype, torch.float32)
        for name, parameter in stage.model.named_parameters():
            if parameter.dtype != self._wide:
                raise ValueError(
                    f"the master weights of sharded stages must be {self._wide}, but {name} is {parameter.dtype}"
                )
        precision = MixedPrecisionPolicy(cast_forward_inputs=False)
        if dtype != self._wide:
            precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=self._wide, cast_forward_inputs=False)
        units = _units(stage)
        for module in (*units, stage):
            fully_shard(module, mesh=mesh, reshard_after_forward=policy == "release", mp_policy=precision)
        stage.dtype = dtype
        self._modules = [module for module in (*units, stage) if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(policy == "release", recurse=False)
            module.register_forward_pre_hook(lambda *_: self._meet())
        self._set_prefetch(units)
        self._groups = _names_by_unit(stage, self._modules)
        self._unit_of = {name: unit for unit, names in enumerate(self._groups) for name in names}
        self._shards_only = gradients == "sharded" and self._shards.size() > 1
        self._totals: dict[str, Tensor] = {}
        self._open: int | None = None
        self._sums: dict[int, Tensor] = {}
        self._names: dict[int, str] = {}
        self._take_products(stage.model)

    def _set_prefetch(self, units: list[nn.Module]) -> None:
        """While a unit computes, gather the one that is next: left to itself, FSDP takes the order of several chunks for one."""
        order = [unit for unit in units if isinstance(unit, FSDPModule)]
        for before, after in itertools.pairwise(order):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        for module in self._modules:
            if module not in order[1:]:
                module.set_modules_to_backward_prefetch([module])

    def _meet(self) -> None:
        """Note the gathered parameters, which FSDP makes at its first gathering and keeps, to know them by name."""
        if len(self._names) == sum(map(len, self._groups)):
            return
        for name, parameter in self._stage.model.named_parameters():
            if not isinstance(parameter, DTensor) and id(parameter) not in self._names:
                self._names[id(parameter)] = name
                parameter.register_post_accumulate_grad_hook(self._collect)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._stage.model.named_parameters()

    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """The unsharded buffer of a gathered parameter."""
        name = self._names[id(parameter)]
        if self._shards_only and self._open != self._unit_of[name]:
            self._close()
            self._open = self._unit_of[name]
            self._allocate(self._groups[self._open])
        return self._totals[name]

    def begin_step(self) -> None:
        self._open = None
        self._sums.clear()
        self._totals.clear()
        if not self._shards_only:
            self._allocate(self._unit_of)

    def _allocate(self, names: Iterable[str]) -> None:
        """Zeros for the whole gradients of those parameters."""
        parameters = self._parameters
        for name in names:
            self._totals[name] = torch.zeros(parameters[name].shape, dtype=self._wide, device=self._stage.device)

    def end_step(self) -> None:
        """Let go of the gathered parameters; sum the gradients over all processes, each of which gets its shard."""
        self.end_forwards()
        self._close()
        for unit, names in enumerate(self._groups):
            if names:
                self._finish(unit)

    @torch.no_grad()
    def _close(self) -> None:
        """Add the open unit's gradients, summed over the processes that share the stage, to their shards."""
        if self._open is not None:
            unit, self._open = self._open, None
            own = self._scatter(self._groups[unit])
            if unit in self._sums:
                self._sums[unit] += own
            else:
                self._sums[unit] = own

    def _scatter(self, names: Sequence[str]) -> Tensor:
        """This process's rows of the gradients of one unit, summed in one message::

        buffer      rank 0's rows of a, of b, ...  |  rank 1's rows of a, of b, ...      rows padded to the same number
        """
        count = self._shards.size()
        widths = [self._padded(name) for name in names]
        buffer = torch.zeros(count, sum(widths), dtype=self._wide, device=self._stage.device)
        for name, columns in zip(names, buffer.split(widths, dim=1), strict=True):
            total = self._totals.pop(name)
            for target, rows in zip(columns, total.split(-(-total.shape[0] // count)), strict=False):
                target[: rows.numel()] = rows.reshape(-1)
        if count == 1:
            return buffer[0]
        own = torch.empty_like(buffer[0])
        dist.reduce_scatter_single(own, buffer.view(-1), group=self._shards)
        return own

    def _padded(self, name: str) -> int:
        """Elements of a process's shard of a parameter; the last processes may have fewer."""
        shape = self._parameters[name].shape
        return -(-shape[0] // self._shards.size()) * math.prod(shape[1:])

    @torch.no_grad()
    def _finish(self, unit: int) -> None:
        """Give a unit's parameters their shards of the gradients, summed over the replicas."""
        names = self._groups[unit]
        if self._shards_only:
            # A unit that no chunk of this replica has used joins in with nothing.
            none = torch.zeros(sum(map(self._padded, names)), dtype=self._wide, device=self._stage.device)
            summed = self._sums.pop(unit, none)
        else:
            summed = self._scatter(names)
        if self._copies_of is not None and self._copies_of.size() > 1:
            dist.all_reduce(summed, group=self._copies_of)
        for name, own in zip(names, summed.split([self._padded(name) for name in names]), strict=True):
            parameter = self._parameters[name]
            assert isinstance(parameter, DTensor)
            shard = parameter.to_local()
            parameter.grad = DTensor.from_local(
                own[: shard.numel()].view(shard.shape),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.named())

    def end_forwards(self) -> None:
        for module in self._modules:
            module.reshard()

    def zero_grad(self) -> None:
        for _, parameter in self.named():
            parameter.grad = None

    def publish(self) -> None:
        """Nothing to do: the next gathering copies the masters."""


def _units(stage: Stage) -> list[nn.Module]:
    """What is gathered together, in order: the embedding, each layer, the head; a weight that both share here goes with the rest."""
    units: list[nn.Module] = list(stage.layers)
    if stage.shares_within:
        return units
    if stage.has_embedding:
        units.insert(0, stage.model.get_input_embeddings())
    if stage.has_head:
        units.append(stage.head)
    return units


def _names_by_unit(stage: Stage, units: Sequence[nn.Module]) -> list[list[str]]:
    """Names of the parameters that are gathered together."""
    names = {id(parameter): name for name, parameter in stage.model.named_parameters()}
    groups = []
    for unit in units:
        own = [names.pop(id(parameter)) for parameter in unit.parameters() if id(parameter) in names]
        groups.append(own)
    return groups


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
