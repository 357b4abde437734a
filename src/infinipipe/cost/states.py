"""What parameters, gradients and optimizer states weigh on a device: the one place that says so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from infinipipe.cost.shape import CostError, ModelShape
from infinipipe.plan import Placement

GatherPolicy = Literal["keep", "release"]
"""``keep``: a parameter, once gathered, stays until the step's end; ``release``: it goes after each use."""
GradientPolicy = Literal["whole", "sharded"]
"""``whole``: gradients accumulate unsharded and are reduced once a step; ``sharded``: each is reduced as soon as a layer has added to
it, and only shards accumulate."""
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Holding:
    """How the processes of a stage hold its states.

    Master weights, accumulated gradients and moments are float32, or float64 where that is computed in.

    Attributes:
        element_bytes: of what is computed with; below 4, a copy of the masters.
        sequence_parallel: processes that share a stage, over which its states are sharded.
        replicas: data-parallel replicas, which hold the same.
        gather_policy, gradient_policy: where there are several processes.
        moments: optimizer states of each parameter, see :func:`infinipipe.cost.optimizers.optimizer_moments`; AdamW has two.
    """

    element_bytes: int = 2
    sequence_parallel: int = 1
    replicas: int = 1
    gather_policy: GatherPolicy = "keep"
    gradient_policy: GradientPolicy = "whole"
    moments: int = 2

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are gathered before use and gradients reduced after it."""
        return self.sequence_parallel * self.replicas > 1

    def bytes_of(self, units: Sequence[int]) -> int:
        """Bytes on one device at the most of a step, of a stage with ``units`` of so many parameters, gathered each at once.

        Sharded states peak while the stage computes, or while its gradients are reduced::

            while it computes   weights and moments / s | gradients, whole or / s | gathered weights, messages of two units
            at the end          weights and moments / s | gradients, whole or / s | messages of one unit's gradients
        """
        wide, share = max(self.element_bytes, FLOAT32_BYTES), 1 / self.sequence_parallel
        count, largest = sum(units), max(units, default=0)
        if not self.is_sharded:
            copy = self.element_bytes if self.element_bytes < wide else 0
            return count * ((2 + self.moments) * wide + copy)
        whole = self.gradient_policy == "whole" or self.sequence_parallel == 1
        held = count * wide * (1 + self.moments) * share + count * wide * (1 if whole else share)
        arriving, there = (size * self.element_bytes for size in self._gathered(units))
        # What a unit's gradients are packed in, what the collective copies of it, and what comes out. Whole, they are packed when the
        # gathered weights are gone, and give way to it.
        reduced = largest * wide * (2 + share if self.sequence_parallel > 1 else 1)
        if whole:
            return round(held + max(arriving, there, reduced - largest * wide))
        return round(held + max(arriving, there + reduced))

    def _gathered(self, units: Sequence[int]) -> tuple[float, float]:
        """The most elements of gathered weights while they arrive, their messages among them, and in a backward.

        A unit's message stays until the next one's is unpacked; the next unit is on its way while one computes.
        """
        largest, pairs = max(units, default=0), [(before, own) for before, own in itertools.pairwise([0, *units])]
        narrow = self.element_bytes < FLOAT32_BYTES
        if self.sequence_parallel == 1:  # Nothing arrives; but for a cast, weights are used where they are unpacked.
            kept = sum(units) if self.gather_policy == "keep" else max(map(sum, pairs)) if narrow else largest
            return 0.0, float(kept)
        if self.gather_policy == "keep":
            before = itertools.accumulate(units)
            return max(total + sum(pair) for total, pair in zip(before, pairs, strict=True)), float(sum(units))
        cast = largest / self.sequence_parallel if narrow else 0.0
        return max(sum(pair) + max(pair) for pair in pairs) + cast, float(max(map(sum, pairs)))


def state_bytes(
    shape: ModelShape, stage_layers: Sequence[int], placement: Placement | None, holding: Holding
) -> tuple[int, ...]:
    """Bytes of parameters, gradients and optimizer states of every stage on one device; ``stage_layers`` are those of every part.

    A stage that has both ends of a model with tied weights has them once; else each of the two stages has a copy.
    """
    return tuple(holding.bytes_of(units) for units in stage_units(shape, stage_layers, placement))


def stage_units(shape: ModelShape, stage_layers: Sequence[int], placement: Placement | None = None) -> list[list[int]]:
    """Parameters of what every stage gathers together, in order: its embedding, each of its layers, its norm and head.

    Raises ``CostError`` if the layers are not the model's.
    """
    if sum(stage_layers) != shape.layers:
        raise CostError(
            f"stage_layers {list(stage_layers)} add up to {sum(stage_layers)}, but the model has {shape.layers} layers"
        )
    ends = list(itertools.accumulate(stage_layers))
    last = len(stage_layers) - 1
    result = []
    for parts in (placement or Placement.plain(len(stage_layers))).parts:
        units = [
            shape.parameters_of(layer) for part in parts for layer in range(ends[part] - stage_layers[part], ends[part])
        ]
        shares_within = shape.tied and 0 in parts and last in parts
        if 0 in parts:
            units.insert(0, shape.embedding_weights)
        if last in parts:
            units.append(shape.hidden + (0 if shares_within else shape.embedding_weights))
        result.append(units)
    return result
