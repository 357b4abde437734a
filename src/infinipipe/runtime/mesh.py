"""The process mesh: replicas x stages x sequence parallelism, and the communicators between its stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from infinipipe.model import SequenceShard, ulysses_degree
from infinipipe.plan import ONE_EACH, Placement
from infinipipe.runtime.transport import ProcessGroupTransport, channel_groups

Dimension = Literal["replica", "stage", "sequence"]
DIMENSIONS: tuple[Dimension, ...] = ("replica", "stage", "sequence")


@dataclass(frozen=True)
class Layout:
    """How many processes there are of each kind.

    Attributes:
        replicas: data-parallel replicas (``d_r``).
        stages: pipeline stages (``d_p``).
        sequence: sequence-parallel degree inside a stage (``d_s``).
        ulysses: how many of those processes exchange tokens for heads, consecutive ones; it divides ``sequence``, and the
            number of heads. All, if 0; see :meth:`for_heads`.
        order: the dimensions from the outermost to the innermost: ranks that follow each other, which are of one node,
            differ in the last one.
        placement: the parts of every stage; each has one if not given.
    """

    replicas: int = 1
    stages: int = 1
    sequence: int = 1
    ulysses: int = 0
    order: tuple[Dimension, ...] = DIMENSIONS
    placement: Placement = ONE_EACH

    def __post_init__(self) -> None:
        for name, size in (("replicas", self.replicas), ("stages", self.stages), ("sequence", self.sequence)):
            if size < 1:
                raise ValueError(f"the layout has {size} {name}; it must be at least 1")
        if not self.placement.parts:
            object.__setattr__(self, "placement", Placement.plain(self.stages))
        if self.placement.num_stages != self.stages:
            raise ValueError(
                f"the placement is of {self.placement.num_stages} stages, but the layout has {self.stages}"
            )
        if self.ulysses and self.sequence % self.ulysses:
            raise ValueError(
                f"{self.ulysses} processes that share heads do not divide a sequence degree of {self.sequence}"
            )
        if sorted(self.order) != sorted(DIMENSIONS):
            raise ValueError(
                f"the order of the mesh is {', '.join(self.order)}; it must name each of {', '.join(DIMENSIONS)}"
            )

    def for_heads(self, num_heads: int) -> Layout:
        """The layout in which as many sequence-parallel processes share ``num_heads`` attention heads as can."""
        return replace(self, ulysses=ulysses_degree(num_heads, self.sequence))

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.replicas * self.stages * self.sequence

    def ranks(self) -> Tensor:
        """Global ranks, int64, indexed by replica, stage and sequence."""
        sizes = {"replica": self.replicas, "stage": self.stages, "sequence": self.sequence}
        grid = torch.arange(self.size).view([sizes[name] for name in self.order])
        return grid.permute([self.order.index(name) for name in DIMENSIONS]).contiguous()

    def pipelines(self) -> list[list[int]]:
        """The global ranks of every pipeline, in the order of its stages."""
        return self.ranks().permute(0, 2, 1).reshape(-1, self.stages).tolist()


class Mesh:
    """This process's place in a layout. Constructing it is a collective of all processes of the default group.

    Attributes:
        replica, stage, sequence: this process's coordinates.
        pipeline: global ranks of the stages that this process exchanges messages with, itself among them.
        parts: those of the model that its stage has.
        ends: the group of the stages with the first and the last part; ``None`` if they are one.
        shard: its share of a chunk's tokens; ``None`` without sequence parallelism.
    """

    def __init__(self, layout: Layout, device_type: str = "cpu") -> None:
        if dist.get_world_size() < layout.size:
            raise ValueError(
                f"the layout needs {layout.size} processes ({layout.replicas} replicas x {layout.stages} stages x "
                f"{layout.sequence} sequence-parallel), but there are {dist.get_world_size()}"
            )
        self.layout = layout
        ranks = layout.ranks()
        self.devices = DeviceMesh(device_type, ranks, mesh_dim_names=DIMENSIONS)
        self._channels = channel_groups(layout.pipelines(), layout.placement)
        first, last = layout.placement.stage_of[0], layout.placement.stage_of[-1]
        ends = {}
        for pipeline in layout.pipelines() if first != last else []:
            ends[pipeline[first], pipeline[last]] = dist.new_group(sorted((pipeline[first], pipeline[last])))
        place = (ranks == dist.get_rank()).nonzero()
        self.is_member = place.numel() > 0
        self.replica, self.stage, self.sequence = (int(i) for i in (place[0] if self.is_member else (0, 0, 0)))
        self.parts = layout.placement.parts[self.stage]
        self.pipeline: list[int] = ranks[self.replica, :, self.sequence].tolist()
        self.ends = ends.get((self.pipeline[first], self.pipeline[last]))
        self.shard = self._sequence_shard(ranks.view(-1, layout.sequence).tolist()) if layout.sequence > 1 else None

    def _sequence_shard(self, stages: list[list[int]]) -> SequenceShard | None:
        """Groups within the sequence-parallel processes of every stage of every replica; returns this process's place."""
        size, degree = self.layout.sequence, self.layout.ulysses or self.layout.sequence
        own = None
        for ranks in stages:
            heads = [dist.new_group(ranks[first : first + degree]) for first in range(0, size, degree)]
            blocks = [dist.new_group(ranks[i::degree]) for i in range(degree)] if degree < size else [None] * degree
            if self.is_member and dist.get_rank() in ranks:
                place = self.sequence // degree, self.sequence % degree
                own = SequenceShard(self.sequence, size, heads[place[0]], degree, blocks[place[1]])
        return own

    def transport(self) -> ProcessGroupTransport:
        """A new transport of this process's messages to other stages."""
        return ProcessGroupTransport(self.pipeline, self._channels, self.layout.placement)

    def sum(self, value: Tensor, *dimensions: Dimension) -> Tensor:
        """Sum ``value``, in place, over the given dimensions of the mesh; all by default. A collective."""
        for name in dimensions or DIMENSIONS:
            if self.devices.size(DIMENSIONS.index(name)) > 1:
                dist.all_reduce(value, group=self.devices.get_group(name))
        return value

    def sharding(self) -> DeviceMesh | None:
        """The mesh over which this stage's states are sharded (sequence) and replicated (replica); ``None`` for one process."""
        if self.layout.replicas * self.layout.sequence == 1:
            return None
        if self.layout.replicas == 1:
            return self.devices["sequence"]
        return self.devices["replica", "sequence"]
