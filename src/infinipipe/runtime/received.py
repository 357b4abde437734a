"""The input of a part: let go of when no layer needs it any more, while its gradient is kept for the part before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Received:
    """The gradient of an input that comes from another part.

    A leaf of autograd would be held by its graph until the backward. In lower precisions no layer saves its input, so that the
    whole input of every chunk under way would be held for nothing.

    Attributes:
        gradient: of the input, of its shape, once the backward is done.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def of(self, inputs: Tensor) -> Tensor:
        """The input as autograd is to see it; whoever has ``inputs`` should let go of it."""
        switch = torch.empty(0, dtype=inputs.dtype, device=inputs.device, requires_grad=True)
        result: Tensor = _Receive.apply(switch, inputs, self)
        return result


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, switch: Tensor, inputs: Tensor, received: Received) -> Tensor:
        ctx.received = received
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ctx.received.gradient,) = grads
        return None, None, None
