"""Linear layers whose weight gradients go straight where they accumulate, at once or when the pipeline has time for them.

The gradient of a weight is a product of the layer's inputs and output gradients, which no other stage waits for. Added up in place it
needs no temporary of the weight's size; put off, it fills what would be a bubble (zero-bubble pipeline parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infinipipe.cost.flops import PRODUCT_BLOCK

GradientOf = Callable[[nn.Parameter], Tensor]
"""The buffer in which a parameter's gradient accumulates, of its shape, in float32 at least."""

Product = Callable[[], None]
"""Computes one weight's gradient of one chunk and adds it up."""


class WeightGradients:
    """Adds up the gradients of linear layers' weights; ``gradient_of`` says where."""

    def __init__(self, gradient_of: GradientOf) -> None:
        self._gradient_of = gradient_of
        self._put_off: list[Product] | None = None

    @property
    def are_put_off(self) -> bool:
        """Whether what is added now is computed later."""
        return self._put_off is not None

    def add(self, weight: nn.Parameter, inputs: Tensor, grad: Tensor) -> None:
        """Account the product of a layer's output gradients (tokens, outputs) and inputs (tokens, inputs)."""
        if self.are_put_off:
            inputs, grad = _alone(inputs), _alone(grad)
        self.do(partial(self._compute, weight, inputs, grad))

    def _compute(self, weight: nn.Parameter, inputs: Tensor, grad: Tensor) -> None:
        add_product(self._gradient_of(weight), grad.T, inputs)

    def do(self, product: Product) -> None:
        """Compute a product at once, or note it within :meth:`putting_off`."""
        if self._put_off is None:
            product()
        else:
            self._put_off.append(product)

    @contextmanager
    def putting_off(self) -> Iterator[list[Product]]:
        """Within the context, products are only noted, in the list that it yields; :func:`settle` computes them."""
        assert self._put_off is None
        self._put_off = []
        try:
            yield self._put_off
        finally:
            self._put_off = None

    def attach(self, model: nn.Module) -> None:
        """Let the linear layers of a model bring their gradients here."""
        for module in model.modules():
            if isinstance(module, AccumulatingLinear):
                module.weight_gradients = self


@torch.no_grad()
def settle(products: list[Product]) -> None:
    """Compute products that were put off; each is let go of as soon as it is done, the last noted first."""
    while products:
        products.pop()()


def _alone(tensor: Tensor) -> Tensor:
    """A tensor that keeps no more than itself: the gradient of a slice's values comes as a view of that of all it attends to."""
    whole = tensor.untyped_storage().nbytes()
    return tensor if whole == tensor.numel() * tensor.element_size() else tensor.clone()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total``, of a dtype that is as wide or wider, without a temporary of its size.

    Where ``total`` is wider, CUDA's kernels add into it themselves; elsewhere the product is rounded to the operands' dtype, a block
    of rows at a time.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        rows = max(1, PRODUCT_BLOCK // b.shape[1])
        for first in range(0, a.shape[0], rows):
            total[first : first + rows] += a[first : first + rows] @ b


class _Linear(torch.autograd.Function):
    """``F.linear`` whose backward hands the weight's gradient to :class:`WeightGradients` instead of to autograd."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: nn.Parameter, bias: Tensor | None, gradients: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.weight, ctx.gradients = weight, gradients
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        inputs, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        input_grad = grad @ weight if needs_input else None
        rows = grad.reshape(-1, grad.shape[-1])
        if needs_weight:
            # With its graph, what is noted for later would keep the part's input and the gradient of that.
            ctx.gradients.add(ctx.weight, inputs.detach().reshape(-1, inputs.shape[-1]), rows)
        return input_grad, None, rows.sum(0) if needs_bias else None, None


class AccumulatingLinear(nn.Linear):
    """A linear layer as :class:`WeightGradients` wants it; without one attached, or without autograd, it is a plain one."""

    weight_gradients: WeightGradients | None = None

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``: (..., inputs) to (..., outputs)."""
        if self.weight_gradients is None or not torch.is_grad_enabled():
            return super().forward(input)
        return _Linear.apply(input, self.weight, self.bias, self.weight_gradients)

    @staticmethod
    def convert(module: nn.Module) -> None:
        """Make all plain linear layers within a module such ones; parameters and their names stay."""
        for inner in module.modules():
            if type(inner) is nn.Linear:
                inner.__class__ = AccumulatingLinear
