"""Every optimizer on sharded stages, resumed in another layout: the losses of a plain loop with torch's own, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from infinipipe.cli.train import read_settings
from infinipipe.cost import OPTIMIZERS
from infinipipe.data import open_corpus
from infinipipe.runtime.pool import WorkerPool
from infinipipe.train.job import Job
from infinipipe.train.loop import Run
from infinipipe.train.optimizer_settings import GroupSettings, OptimizerSettings
from infinipipe.train.reference import Clip, plain_losses, start_model
from infinipipe.train.settings import Settings
from infinipipe.verify.reference import float64_kept

from .pooled import change, losses, read_records

STEPS, SAVED = 4, 2
BEFORE, AFTER = (1, 2, 2), (2, 2, 1)
COMMON: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
TORCHS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, betas=(0.9, 0.95), eps=1e-6, **COMMON),
    "adam": lambda p: torch.optim.Adam(p, betas=(0.9, 0.95), eps=1e-6, **COMMON),
    "adamax": lambda p: torch.optim.Adamax(p, betas=(0.9, 0.95), eps=1e-6, **COMMON),
    "nadam": lambda p: torch.optim.NAdam(p, betas=(0.9, 0.95), eps=1e-6, decoupled_weight_decay=True, **COMMON),
    "radam": lambda p: torch.optim.RAdam(p, betas=(0.9, 0.95), eps=1e-6, decoupled_weight_decay=True, **COMMON),
    "adagrad": lambda p: torch.optim.Adagrad(p, eps=1e-6, **COMMON),
    "rmsprop": lambda p: torch.optim.RMSprop(p, alpha=0.95, eps=1e-6, **COMMON),
    "sgd": lambda p: torch.optim.SGD(p, momentum=0.9, **COMMON),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4) as workers:
        yield workers


@pytest.fixture(scope="module")
def settings(config: Path) -> Settings:
    settings = read_settings([str(config)])[0]
    double: dict[str, Any] = {"dtype": "float64"}
    return replace(
        settings,
        model=replace(settings.model, **double),
        data=replace(settings.data, sequences_per_step=8),
        plan=replace(settings.plan, num_slices=2),
    )


def chosen(name: str, **changes: Any) -> OptimizerSettings:
    epsilon: dict[str, Any] = {} if name == "sgd" else {"epsilon": 1e-6}
    return OptimizerSettings(name=name, learning_rate=0.01, warmup_steps=2, max_norm=0.5, **epsilon, **changes)


def execute(rank: int, settings: Settings) -> int:
    with float64_kept():
        return Run(Job.among(range(4), torch.device("cpu")), settings, "text: kept").execute()


def trained(pool: WorkerPool, settings: Settings, folder: Path) -> list[float]:
    """Losses of all steps, the later ones in another layout."""
    for layout, stop in ((BEFORE, SAVED), (AFTER, STEPS)):
        one = change(settings, layout, folder, steps=STEPS, stop_after=stop, checkpoint_every=SAVED)
        assert pool.run(execute, one) == [0] * 4
    return losses(read_records(one))


def expected(
    settings: Settings, optimizers: Callable[[PreTrainedModel], tuple[torch.optim.Optimizer, Clip]]
) -> list[float]:
    whole = replace(settings, train=replace(settings.train, steps=STEPS))
    with float64_kept():
        model = start_model(whole, open_corpus(whole.data, whole.tokenizer), torch.float64)
        return plain_losses(whole, STEPS, model, optimizers)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_what_torchs_own_does_in_one_process(
    pool: WorkerPool, settings: Settings, tmp_path: Path, name: str
) -> None:
    settings = replace(settings, optimizer=chosen(name))

    def plain(model: PreTrainedModel) -> tuple[torch.optim.Optimizer, Clip]:
        matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
        optimizer = TORCHS[name]([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
        return optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    assert trained(pool, settings, tmp_path) == pytest.approx(expected(settings, plain), abs=1e-9)


def test_groups_of_parameters_are_treated_apart(pool: WorkerPool, settings: Settings, tmp_path: Path) -> None:
    """Rates, decay and clipping by group, with an embedding whose weight the head on another stage shares."""
    groups = {
        "mlp": GroupSettings(["*.mlp.*"], learning_rate=0.003, max_norm=0.05),
        "ends": GroupSettings(["*embed_tokens*"], weight_decay=0.0, max_norm=0.0),
        "norms": GroupSettings(["*norm*"], weight_decay=0.2),
    }
    settings = replace(settings, optimizer=chosen("adamw", groups=groups))

    def plain(model: PreTrainedModel) -> tuple[torch.optim.Optimizer, Clip]:
        named = dict(model.named_parameters())
        parts = {key: [p for name, p in named.items() if key in name] for key in ("mlp", "embed_tokens", "norm")}
        rest = [p for p in named.values() if not any(p is other for part in parts.values() for other in part)]
        optimizer = TORCHS["adamw"](
            [
                {"params": parts["mlp"], "lr": 0.003},
                {"params": parts["embed_tokens"], "weight_decay": 0.0},
                {"params": parts["norm"], "weight_decay": 0.2},
                {"params": rest},
            ]
        )

        def clip() -> None:
            torch.nn.utils.clip_grad_norm_(parts["mlp"], 0.05)
            torch.nn.utils.clip_grad_norm_([*parts["norm"], *rest], 0.5)

        return optimizer, clip

    found = trained(pool, settings, tmp_path)
    assert found == pytest.approx(expected(settings, plain), abs=1e-9)
    ungrouped = replace(settings, optimizer=replace(settings.optimizer, groups={}))
    assert max(abs(a - b) for a, b in zip(found, trained(pool, ungrouped, tmp_path / "all"), strict=True)) > 1e-4
    assert math.isfinite(found[-1])
