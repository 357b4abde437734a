"""AdamW with linear warm-up and cosine decay."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from infinipipe.train.settings import OptimizerSettings


def build_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW in which matrices decay and vectors do not."""
    given = list(parameters)
    groups = [
        {"params": [p for p in given if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in given if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
    )


def learning_rate(step: int, num_steps: int, settings: OptimizerSettings) -> float:
    """The learning rate of ``step``, counted from 0: it rises to the highest, then falls to its final share."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(num_steps - settings.warmup_steps, 1)
    share = settings.final_share + (1 - settings.final_share) * 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * share
