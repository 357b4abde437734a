"""Master weights and accumulated gradients of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn


class HasModel(Protocol):
    """A stage's module, whose parameters are the stage's."""

    @property
    def model(self) -> nn.Module: ...


class Parameters:
    """What the optimizer sees of a stage: master parameters whose ``grad`` accumulates over the chunks of a step.

    Parameters in float32 or float64 are their own masters. Those in a lower precision compute with rounded copies, while
    masters and gradients are float32: call :meth:`publish` after each optimizer step.
    """

    is_sharded = False
    """Whether gradients are reduced over other processes, which all must take part in every step."""

    def __init__(self, stage: HasModel) -> None:
        self._master: dict[str, nn.Parameter] = {}
        self._of: dict[int, nn.Parameter] = {}
        self._compute: dict[str, nn.Parameter] = dict(stage.model.named_parameters())
        for name, parameter in self._compute.items():
            wide = torch.promote_types(parameter.dtype, torch.float32)
            master = parameter if parameter.dtype == wide else nn.Parameter(parameter.detach().to(wide))
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

    def collect(self) -> None:
        """Add the gradients that a backward left on lower-precision copies to their masters' and drop them."""
        for name, parameter in self._compute.items():
            master = self._master[name]
            if parameter is not master and parameter.grad is not None:
                assert master.grad is not None
                master.grad.add_(parameter.grad)
                parameter.grad = None

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        for master in self._master.values():
            assert master.grad is not None
            master.grad.zero_()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the lower-precision parameters that compute."""
        for name, parameter in self._compute.items():
            if parameter is not self._master[name]:
                parameter.copy_(self._master[name])
