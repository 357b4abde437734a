"""Head and cross-entropy in token blocks: logits of more than one block never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

IGNORE = -100
"""Label of a token without supervision."""

GradientOf = Callable[[nn.Parameter], Tensor]
"""The buffer in which a parameter's gradient accumulates."""


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
        scale: float,
        block_tokens: int,
        gradient_of: GradientOf | None,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        hidden_grad = torch.zeros_like(hidden) if gradient_of is not None else None
        for first in range(0, hidden.shape[0], block_tokens):
            block = slice(first, first + block_tokens)
            supervised = (labels[block] != IGNORE).nonzero().squeeze(1)
            if supervised.numel() == 0:
                continue
            rows = hidden[block][supervised]
            targets = labels[block][supervised].unsqueeze(1)
            logits = nn.functional.linear(rows, weight, bias).to(wide)
            log_sum = logits.logsumexp(1, keepdim=True)
            loss += (log_sum - logits.gather(1, targets)).sum(dtype=torch.float64)
            if gradient_of is None or hidden_grad is None:
                continue
            logits_grad = logits.sub_(log_sum).exp_()
            logits_grad.scatter_add_(1, targets, logits_grad.new_full(targets.shape, -1.0))
            narrow = logits_grad.mul_(scale).to(hidden.dtype)
            hidden_grad[block][supervised] = narrow @ weight
            _add_product(gradient_of(weight), narrow.T, rows)
            if bias is not None:
                gradient_of(bias).add_(narrow.sum(0))
        ctx.save_for_backward(hidden_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_grad,) = ctx.saved_tensors
        return hidden_grad, None, None, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def block_loss(
    hidden: Tensor,
    head: nn.Linear,
    labels: Tensor,
    *,
    scale: float,
    block_tokens: int,
    gradient_of: GradientOf | None,
) -> Tensor:
    """Sum of the token losses of a chunk, float64; its backward yields the gradients of ``scale`` times that sum.

    ``hidden`` is (tokens, hidden size), ``labels`` (tokens,) int64 with ``IGNORE`` where a token is not supervised. The
    head's gradients are added to the buffers of ``gradient_of`` in the forward already; without it, no gradient is computed.
    The value that arrives in backward is ignored: the scale is the loss's only factor.
    """
    return _BlockLoss.apply(hidden, head.weight, head.bias, labels, scale, block_tokens, gradient_of)
