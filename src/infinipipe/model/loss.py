"""Head and cross-entropy in token blocks: logits of more than one block never exist at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infinipipe.model.linear import GradientOf, add_product

IGNORE = -100
"""Label of a token without supervision."""


@dataclass(frozen=True)
class LossTarget:
    """What the last stage needs besides hidden states.

    Attributes:
        labels: (local tokens,) int64 with ``IGNORE`` where a token is not supervised.
        weights: (local tokens,) float32, what each token's loss counts; 1 if there are none.
        scale: factor of the loss in its gradients.
        block_tokens: tokens whose logits exist at once.
        gradient_of: where the head's gradients accumulate; without it none is computed.
    """

    labels: Tensor
    weights: Tensor | None
    scale: float
    block_tokens: int
    gradient_of: GradientOf | None


class _BlockLoss(torch.autograd.Function):
    """Computes the loss together with its gradients, block by block, in the forward.

    What waits for the backward is the gradient of the hidden states, as large as the hidden states themselves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        labels: Tensor,
        weights: Tensor | None,
        scale: float,
        block_tokens: int,
        gradient_of: GradientOf | None,
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        hidden_grad = torch.zeros_like(hidden) if gradient_of is not None else None
        if gradient_of is not None:
            # Asking for the buffer may be a message to the processes that share the stage, some of which may have no labels.
            gradient_of(weight)
        for first in range(0, hidden.shape[0], block_tokens):
            block = slice(first, first + block_tokens)
            supervised = (labels[block] != IGNORE).nonzero().squeeze(1)
            if supervised.numel() == 0:
                continue
            rows, targets = hidden[block][supervised], labels[block][supervised].unsqueeze(1)
            counts = None if weights is None else weights[block][supervised].unsqueeze(1)
            rows_loss, rows_grad = _rows_loss(rows, weight, bias, targets, counts, scale, gradient_of)
            loss += rows_loss
            if hidden_grad is not None and rows_grad is not None:
                hidden_grad[block][supervised] = rows_grad
        ctx.save_for_backward(hidden_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_grad,) = ctx.saved_tensors
        return hidden_grad, None, None, None, None, None, None, None


class LossHead(nn.Module):
    """Output projection and loss as one module; takes the place, and the parameter names, of the projection."""

    bias: nn.Parameter | None

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.weight = projection.weight
        self.register_parameter("bias", projection.bias)

    def forward(self, hidden: Tensor, target: LossTarget) -> Tensor:
        """The loss of a chunk, see :func:`block_loss`; ``hidden`` is (local tokens, hidden size)."""
        return block_loss(
            hidden,
            self,
            target.labels,
            weights=target.weights,
            scale=target.scale,
            block_tokens=target.block_tokens,
            gradient_of=target.gradient_of,
        )


def _rows_loss(
    rows: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    targets: Tensor,
    counts: Tensor | None,
    scale: float,
    gradient_of: GradientOf | None,
) -> tuple[Tensor, Tensor | None]:
    """Loss of supervised rows, each counting ``counts`` or once, and the gradient of the rows.

    Logits, probabilities and their gradient are one buffer.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    logits = nn.functional.linear(rows, weight, bias).to(wide)
    if counts is not None:
        counts = counts.to(wide)  # before it is multiplied: a product in its own type would be rounded
    logits.sub_(logits.amax(1, keepdim=True))
    chosen = logits.gather(1, targets)
    total = logits.exp_().sum(1, keepdim=True)
    losses = total.log() - chosen
    loss = (losses if counts is None else losses * counts).sum(dtype=torch.float64)
    if gradient_of is None:
        return loss, None
    logits.div_(total).scatter_add_(1, targets, logits.new_full(targets.shape, -1.0))
    gradient = logits.mul_(scale if counts is None else scale * counts).to(rows.dtype)
    del logits
    add_product(gradient_of(weight), gradient.T, rows)
    if bias is not None:
        gradient_of(bias).add_(gradient.sum(0))
    return loss, gradient @ weight


def block_loss(
    hidden: Tensor,
    head: nn.Linear | LossHead,
    labels: Tensor,
    *,
    weights: Tensor | None = None,
    scale: float,
    block_tokens: int,
    gradient_of: GradientOf | None,
) -> Tensor:
    """Weighted sum of the token losses of a chunk, float64; its backward yields the gradients of ``scale`` times that sum.

    ``hidden`` is (tokens, hidden size), ``labels`` (tokens,) int64 with ``IGNORE`` where a token is not supervised, ``weights``
    (tokens,) float32, or nothing where each counts once. The
    head's gradients are added to the buffers of ``gradient_of`` in the forward already; without it, no gradient is computed.
    The value that arrives in backward is ignored: the scale is the loss's only factor.
    """
    return _BlockLoss.apply(hidden, head.weight, head.bias, labels, weights, scale, block_tokens, gradient_of)
