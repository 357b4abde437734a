"""Master weights and accumulated gradients of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from infinipipe.model import WeightGradients


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

    Attributes:
        weight_gradients: where the gradients of linear layers' weights go.
    """

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
        self._take_products(stage.model)

    def _take_products(self, model: nn.Module) -> None:
        self.weight_gradients = WeightGradients(self.gradient_of)
        self.weight_gradients.attach(model)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Master parameters under their Hugging Face names; a weight shared within the stage comes once."""
        yield from self._master.items()

    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """The buffer in which the gradient of a parameter of the stage's module accumulates."""
        gradient = self._of[id(parameter)].grad
        assert gradient is not None
        return gradient

    def begin_step(self) -> None:
        """Called before the first action of a step. With :meth:`end_step` the place for what processes do together."""

    def end_step(self) -> None:
        """Called after the last action of a step, when all gradients have been added up here."""

    def end_forwards(self) -> None:
        """Called after forwards that no backward follows."""

    def _collect(self, parameter: Tensor) -> None:
        """Add the gradient that autograd left on a parameter to where it accumulates, and drop it."""
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None:
            self.gradient_of(parameter).add_(parameter.grad)
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
