"""A stage that waits where another would compute."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from infinipipe.model import ChunkContext, LossTarget, WeightGradients
from infinipipe.plan import Chunk
from infinipipe.runtime import Parameters

Waits = Mapping[tuple[int, Chunk], Mapping[str, float]]
"""Seconds by part and chunk, and by column of the cost table, recompute included."""


class _Wait(torch.autograd.Function):
    """Sleeps in forward and backward; values are zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        anchor: Tensor,
        shape: tuple[int, ...],
        seconds: Mapping[str, float],
        gradients: WeightGradients,
    ) -> Tensor:
        time.sleep(seconds.get("forward", 0.0))
        ctx.seconds, ctx.gradients = seconds, gradients
        ctx.shape, ctx.takes_gradient = inputs.shape, inputs.is_floating_point()
        return anchor.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if ctx.gradients.are_put_off:
            time.sleep(ctx.seconds.get("backward_input", 0.0))
            ctx.gradients.do(partial(time.sleep, ctx.seconds.get("backward_weight", 0.0)))
        else:
            time.sleep(ctx.seconds.get("backward", 0.0))
        return (grad.new_zeros(ctx.shape) if ctx.takes_gradient else None), None, None, None, None


class WaitingStage(nn.Module):
    """Stands in for :class:`infinipipe.model.Stage`: messages of ``hidden_size`` numbers a token, no computing.

    ``waits`` are the seconds of its chunks at its parts; those that it lacks are 0. The halves of a backward wait each for
    themselves.

    Attributes:
        weights: its parameters, for the executor.
    """

    def __init__(self, parts: tuple[int, ...], num_parts: int, waits: Waits, *, hidden_size: int = 2) -> None:
        super().__init__()
        self.parts = parts
        self.num_parts = num_parts
        self.hidden_size = hidden_size
        self.dtype = torch.float64
        self.device = torch.device("cpu")
        self.model = nn.Linear(hidden_size, 1, bias=False, dtype=torch.float64)
        self.weights = Parameters(self)
        self._waits = waits

    def layer_range(self, part: int) -> range:
        """No layers: there is nothing to release."""
        return range(0)

    def forward(
        self,
        inputs: Tensor,
        context: ChunkContext,
        part: int,
        recompute: int = 0,
        target: LossTarget | None = None,
    ) -> Tensor:
        """Zeros, (tokens, hidden size), or a loss of zero, after the chunk's forward seconds; their backward waits too."""
        shape = () if part == self.num_parts - 1 else (inputs.shape[0], self.hidden_size)
        seconds = self._waits.get((part, context.chunk), {})
        return _Wait.apply(inputs, self.model.weight, shape, seconds, self.weights.weight_gradients)
