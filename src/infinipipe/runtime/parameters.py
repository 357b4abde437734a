"""Master weights and accumulated gradients of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn


class HasModel(Protocol):
    """A stage's module, whose parameters are the stage's, and the dtype that it computes in."""

    dtype: torch.dtype

    @property
    def model(self) -> nn.Module: ...


class Parameters:
    """What the optimizer sees of a stage: master parameters whose ``grad`` accumulates over the chunks of a step.

    Parameters that compute in float32 or float64 are their own masters. To compute in a lower precision, ``dtype``, the
    stage's parameters become rounded copies, while masters and gradients are float32: call :meth:`publish` after each
    optimizer step.
    """

    is_sharded = False
    """Whether gradients are reduced over other processes, which all must take part in every step."""

    def __init__(self, stage: HasModel, dtype: torch.dtype | None = None) -> None:
        self._master: dict[str, nn.Parameter] = {}
        self._of: dict[int, nn.Parameter] = {}
        self._copies: dict[str, nn.Parameter] = {}
        stage.dtype = dtype or stage.dtype
        for name, parameter in stage.model.named_parameters():
            wide = torch.promote_types(parameter.dtype, torch.float32)
            if stage.dtype == wide:
                master = parameter
            else:
                master = nn.Parameter(parameter.detach().to(wide))
                parameter.data = parameter.data.to(stage.dtype)
                parameter.register_post_accumulate_grad_hook(self._collect)
                self._copies[name] = parameter
            master.grad = torch.zeros_like(master)
            self._master[name] = master
            self._of[id(parameter)] = master

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Master parameters under their Hugging Face names; a weight shared within the stage comes once."""
        yield from self._master.items()

    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """The buffer in which the gradient of a parameter of the stage's module accumulates."""
        gradient = self._of[id(parameter)].grad
        assert gradient is not None
        return gradient

    def hand_over(self, parameter: nn.Parameter) -> Tensor | None:
        """What autograd is to pass on as the gradient of a parameter whose gradient accumulates elsewhere."""
        return None

    def begin_step(self) -> None:
        """Called before the first action of a step."""

    def begin_last_backward(self) -> None:
        """Called before the last backward of a step."""

    def end_forwards(self) -> None:
        """Called after forwards that no backward follows."""

    def _collect(self, parameter: Tensor) -> None:
        """Add the gradient that a backward left on a lower-precision copy to its master's and drop it."""
        gradient = self._of[id(parameter)].grad
        assert gradient is not None
        if parameter.grad is not None:
            gradient.add_(parameter.grad)
            parameter.grad = None

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        for master in self._master.values():
            assert master.grad is not None
            master.grad.zero_()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the lower-precision parameters that compute."""
        for name, parameter in self._copies.items():
            parameter.copy_(self._master[name])
