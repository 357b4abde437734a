"""What training without a pipeline would meet on the same machine: links of groups of any size, parameters sharded over all devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from infinipipe.cost.analytic import AnalyticCost

PASSES = 3
"""Parameters are gathered for the forward and again for the backward, and their gradients scattered."""


@dataclass(frozen=True)
class Network:
    """The links of a cluster.

    Attributes:
        bandwidths: bytes per second of an all-to-all by group size; groups of other sizes have that of the next larger one, or of
            the largest.
        micro_batch_seconds: fixed cost of a micro-batch of the whole model, its parameters sharded over all devices (ZeRO-3).
    """

    bandwidths: Mapping[int, float]
    micro_batch_seconds: float

    @classmethod
    def of(cls, cost: AnalyticCost) -> Network:
        """As far as a cost model knows: the all-to-all of a stage's devices stands for all groups and for the parameters' way."""
        seconds_per_byte = cost.all_to_all.seconds_per_byte
        parameters = cost.shape.parameters if cost.shape is not None else 0
        gathering = PASSES * parameters * cost.element_bytes * seconds_per_byte
        bandwidth = 1 / seconds_per_byte if seconds_per_byte else math.inf
        return cls({cost.sequence_parallel: bandwidth}, cost.chunk_seconds() + gathering)

    def bandwidth(self, degree: int) -> float:
        """Bytes per second of an all-to-all of a group."""
        known = [size for size in self.bandwidths if size >= degree]
        return self.bandwidths[min(known)] if known else self.bandwidths[max(self.bandwidths)]
