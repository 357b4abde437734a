"""The same training by the plain Hugging Face model in one process: what a run's losses are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from infinipipe.data import Corpus, open_corpus
from infinipipe.model import build_stage
from infinipipe.train.loader import sampled_batch
from infinipipe.train.model import Vocabulary, open_checkpoint, open_model
from infinipipe.train.settings import Settings
from infinipipe.verify.reference import plain_model, reference_step

Clip = Callable[[], object]
"""Clips the gradients of a model."""


def plain_losses(
    settings: Settings,
    num_steps: int,
    model: PreTrainedModel | None = None,
    optimizers: Callable[[PreTrainedModel], tuple[torch.optim.Optimizer, Clip]] | None = None,
) -> list[float]:
    """Losses of the first ``num_steps`` steps on the same global batches, sequence by sequence, without any pipeline.

    Starts from the run's weights, or from ``model``, which is trained in place. Optimizer, schedule and clipping are torch's
    own: AdamW with a cosine, and clipping of the norm of all gradients, unless ``optimizers`` makes others.
    """
    torch.set_num_threads(settings.parallel.threads)
    corpus = open_corpus(settings.data, settings.tokenizer)
    batches = corpus.batches(settings.data, settings.train.seed)
    model = model or start_model(settings, corpus)
    optimizer, clip = (optimizers or partial(_adamw, settings))(model)
    chosen = settings.optimizer
    warmup, rest = chosen.warmup_steps, max(settings.train.steps - chosen.warmup_steps, 1)

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return chosen.final_share + (1 - chosen.final_share) * (1 + math.cos(math.pi * (step - warmup) / rest)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    losses = []
    for _ in range(num_steps):
        loss, _ = reference_step(model, sampled_batch(batches).batch)
        losses.append(loss)
        clip()
        optimizer.step()
        schedule.step()
    batches.close()
    return losses


def _adamw(settings: Settings, model: PreTrainedModel) -> tuple[torch.optim.Optimizer, Clip]:
    chosen = settings.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": chosen.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=chosen.learning_rate,
        betas=chosen.betas,
        eps=chosen.epsilon,
    )
    most = chosen.max_norm or math.inf
    return optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), most)


def start_model(settings: Settings, corpus: Corpus, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The plain model with the weights that a run starts from."""
    config = open_model(settings, Vocabulary.of(corpus.tokenizer)).config
    checkpoint = open_checkpoint(settings.model, config) if settings.model.weights == "load" else None
    whole = build_stage(
        config, (config.num_hidden_layers,), 0, seed=settings.train.seed, checkpoint=checkpoint, dtype=dtype
    )
    return plain_model(config, whole.model.state_dict(), dtype)
