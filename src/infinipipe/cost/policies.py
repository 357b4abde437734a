"""What a policy of gradients costs in time."""

from __future__ import annotations

from dataclasses import replace

from infinipipe.cost.analytic import AnalyticCost, PassTime
from infinipipe.cost.shape import ModelShape
from infinipipe.cost.states import FLOAT32_BYTES, Holding


def with_policies(cost: AnalyticCost, shape: ModelShape, holding: Holding) -> AnalyticCost:
    """``cost``, whose links are those of a stage's processes, with what each chunk's gradients take to be reduced, if they are.

    The gradients of a layer are one message of float32, of which a device keeps its share and sends the rest.
    """
    devices = holding.sequence_parallel
    if holding.gradient_policy == "whole" or devices == 1:
        return cost
    layer = sum(map(shape.parameters_of, range(shape.layers))) / shape.layers
    wide = max(holding.element_bytes, FLOAT32_BYTES)
    link = cost.all_to_all
    seconds = link.latency + layer * wide * (devices - 1) / devices * link.seconds_per_byte

    def slower(time: PassTime | None) -> PassTime | None:
        return None if time is None else replace(time, chunk=time.chunk + seconds)

    return replace(
        cost,
        backward=replace(cost.backward, chunk=cost.backward.chunk + seconds),
        backward_weight=slower(cost.backward_weight),
    )
