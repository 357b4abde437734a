"""A stage that waits where another would compute."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from infinipipe.model import ChunkContext, LossTarget
from infinipipe.plan import Chunk

Waits = Mapping[Chunk, tuple[float, float]]
"""Seconds of every chunk's forward and backward, recompute included."""


class _Wait(torch.autograd.Function):
    """Sleeps in forward and backward; values are zeros."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, anchor: Tensor, shape: tuple[int, ...], seconds: tuple[float, float]
    ) -> Tensor:
        time.sleep(seconds[0])
        ctx.seconds, ctx.shape, ctx.takes_gradient = seconds[1], inputs.shape, inputs.is_floating_point()
        return anchor.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        time.sleep(ctx.seconds)
        return (grad.new_zeros(ctx.shape) if ctx.takes_gradient else None), None, None, None


class WaitingStage(nn.Module):
    """Stands in for :class:`infinipipe.model.Stage`: messages of ``hidden_size`` numbers a token, no computing.

    ``waits`` are the seconds of its chunks; those of a chunk that it lacks are 0.
    """

    def __init__(self, index: int, num_stages: int, waits: Waits, *, hidden_size: int = 2) -> None:
        super().__init__()
        self.index = index
        self.num_stages = num_stages
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.hidden_size = hidden_size
        self.dtype = torch.float64
        self.device = torch.device("cpu")
        self.model = nn.Linear(hidden_size, 1, bias=False, dtype=torch.float64)
        self._waits = waits

    def forward(
        self, inputs: Tensor, context: ChunkContext, recompute: int = 0, target: LossTarget | None = None
    ) -> Tensor:
        """Zeros, (tokens, hidden size), or a loss of zero, after the chunk's forward seconds; their backward waits too."""
        shape = () if self.is_last else (inputs.shape[0], self.hidden_size)
        return _Wait.apply(inputs, self.model.weight, shape, self._waits.get(context.chunk, (0.0, 0.0)))
