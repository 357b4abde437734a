from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from infinipipe.model import IGNORE, block_loss
from infinipipe.runtime import MemoryMeter

TOKENS, HIDDEN, VOCAB = 37, 8, 50


def loss_inputs(mask: str, *, bias: bool = False) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=torch.float64)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, VOCAB, (TOKENS,))
    if mask == "some":
        labels[torch.rand(TOKENS) < 0.5] = IGNORE
    elif mask == "block":
        labels[8:24] = IGNORE
    elif mask == "all":
        labels[:] = IGNORE
    return hidden, head, labels


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block", [1, 8, 37, 100])
@pytest.mark.parametrize("mask", ["none", "some", "block", "all"])
def test_blocks_equal_cross_entropy(mask: str, block: int, bias: bool) -> None:
    hidden, head, labels = loss_inputs(mask, bias=bias)
    parameters = list(head.parameters())
    expected = nn.functional.cross_entropy(head(hidden), labels, ignore_index=IGNORE, reduction="sum")
    reference = torch.autograd.grad(expected * 0.25, [hidden, *parameters])
    buffers = {id(p): torch.ones_like(p) for p in parameters}
    loss = block_loss(hidden, head, labels, scale=0.25, block_tokens=block, gradient_of=lambda p: buffers[id(p)])
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, reference[0], rtol=0, atol=1e-14)
    for parameter, gradient in zip(parameters, reference[1:], strict=True):
        torch.testing.assert_close(buffers[id(parameter)] - 1, gradient, rtol=0, atol=1e-13)
    if mask == "all":
        assert loss.item() == 0
        assert not hidden.grad.any()


@pytest.mark.parametrize("block", [8, 100])
@pytest.mark.parametrize("mask", ["none", "some", "all"])
def test_weights_multiply_the_losses_of_their_tokens(mask: str, block: int) -> None:
    hidden, head, labels = loss_inputs(mask, bias=True)
    weights = 3 * torch.rand(TOKENS)
    losses = nn.functional.cross_entropy(head(hidden), labels, ignore_index=IGNORE, reduction="none")
    expected = (losses * weights).sum()
    reference = torch.autograd.grad(expected * 0.25, [hidden, *head.parameters()])
    buffers = {id(p): torch.zeros_like(p) for p in head.parameters()}
    loss = block_loss(
        hidden, head, labels, weights=weights, scale=0.25, block_tokens=block, gradient_of=lambda p: buffers[id(p)]
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    found = [hidden.grad, *(buffers[id(p)] for p in head.parameters())]
    for gradient, own in zip(reference, found, strict=True):
        torch.testing.assert_close(own, gradient, rtol=0, atol=1e-13)


def test_without_gradients_nothing_is_kept() -> None:
    hidden, head, labels = loss_inputs("some")
    with torch.no_grad():
        loss = block_loss(hidden, head, labels, scale=1.0, block_tokens=8, gradient_of=None)
    expected = nn.functional.cross_entropy(head(hidden), labels, ignore_index=IGNORE, reduction="sum")
    assert loss.item() == pytest.approx(expected.item())
    assert not loss.requires_grad


@pytest.mark.parametrize("block", [64, 128])
def test_logits_of_one_block_live_at_once(block: int) -> None:
    tokens, vocab = 1024, 2000
    head = nn.Linear(4, vocab, bias=False)
    hidden = torch.randn(tokens, 4, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    buffer = torch.zeros_like(head.weight)
    with MemoryMeter() as meter:
        block_loss(hidden, head, labels, scale=1.0, block_tokens=block, gradient_of=lambda _: buffer).backward()
    logits = 4 * block * vocab
    assert logits < meter.peak < 1.2 * logits
