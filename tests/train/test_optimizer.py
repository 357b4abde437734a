"""The learning rate's course and what decays."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from infinipipe.train.optimizer import build_optimizer, learning_rate
from infinipipe.train.settings import OptimizerSettings

SETTINGS = OptimizerSettings(learning_rate=1.0, final_share=0.1, warmup_steps=4)


def test_warm_up_then_cosine() -> None:
    rates = [learning_rate(step, 104, SETTINGS) for step in range(105)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[54] == pytest.approx(0.55)
    assert rates[104] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))


def test_no_warm_up_and_warm_up_longer_than_the_run() -> None:
    assert learning_rate(0, 10, OptimizerSettings(learning_rate=1.0, warmup_steps=0)) == 1.0
    assert learning_rate(2, 3, OptimizerSettings(learning_rate=1.0, warmup_steps=10)) == pytest.approx(0.3)


def test_only_matrices_decay() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([matrix, vector], OptimizerSettings(learning_rate=0.1, weight_decay=0.5))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(vector, torch.ones(2))
