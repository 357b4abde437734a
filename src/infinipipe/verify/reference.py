"""The reference that exactness is measured against: the plain Hugging Face model, every sequence alone, in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from infinipipe.model import IGNORE
from infinipipe.runtime import Batch


@contextmanager
def float64_kept() -> Iterator[None]:
    """Within the context, float64 tensors are not cast to float32.

    Models compute norms in float32 whatever their dtype; where that includes the norm's weight, the order of the sum over
    tokens alone makes 2e-7 of difference between any two groupings of the same tokens. Kept in float64, on both sides, the
    difference vanishes.
    """
    plain_float, plain_to = torch.Tensor.float, torch.Tensor.to

    def keep_float(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else plain_float(tensor)

    def keep_to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype == torch.float64 and torch.float32 in (*args, kwargs.get("dtype")):
            return tensor
        return plain_to(tensor, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "float", keep_float), mock.patch.object(torch.Tensor, "to", keep_to):
        yield


def plain_model(config: PretrainedConfig, state: Mapping[str, Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """The Hugging Face model with the given weights, under their names; tied weights may be left out."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    missing, unexpected = model.load_state_dict(dict(state), strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert not unexpected, unexpected
    assert set(missing) <= tied, missing
    return model.train()


def reference_step(model: PreTrainedModel, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Mean token loss over the batch, and its gradients by parameter name; sequences run one by one."""
    total = torch.zeros((), dtype=torch.float64)
    model.zero_grad()
    for index, (tokens, labels) in enumerate(zip(batch.tokens, batch.labels, strict=True)):
        if bool((labels == IGNORE).all()):
            continue
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        loss = losses.sum() if batch.weights is None else (losses * batch.weights[index]).sum()
        (loss / batch.total_weight).backward()
        total += loss.detach()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()
    }
    return float(total) / (batch.total_weight or 1.0), gradients


def relative_error(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The largest of ``max|g - r| / max(max|r|, 1e-6 x largest gradient of the model)`` over all parameters."""
    assert gradients.keys() == reference.keys(), gradients.keys() ^ reference.keys()
    largest = max(float(r.abs().max()) for r in reference.values())
    worst = 0.0
    for name, r in reference.items():
        scale = max(float(r.abs().max()), 1e-6 * largest)
        difference = float((gradients[name].to(r.dtype) - r).abs().max())
        if not difference < float("inf"):
            return float("inf")
        worst = max(worst, difference / scale if scale > 0 else difference)
    return worst
