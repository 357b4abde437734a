"""Optimizers by name: their groups and what they keep of a parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from infinipipe.cost import OPTIMIZERS, Holding, optimizer_moments
from infinipipe.settings import SettingError
from infinipipe.train.optimizer import CLASSES, ParameterGroups, build_optimizer, set_learning_rate, state_names
from infinipipe.train.optimizer_settings import REFUSED, GroupSettings, OptimizerSettings

NAMES = ("embed.weight", "layers.0.mlp.up.weight", "layers.0.norm.weight", "layers.1.mlp.up.weight")


def groups(settings: OptimizerSettings) -> ParameterGroups:
    return ParameterGroups(settings, NAMES, {NAMES[0]})


def build(settings: OptimizerSettings, **parameters: nn.Parameter) -> torch.optim.Optimizer:
    return build_optimizer(parameters.items(), settings, ParameterGroups(settings, parameters, ()))


def stepped(settings: OptimizerSettings) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    """An optimizer after a step over one parameter."""
    parameter = nn.Parameter(torch.ones(5, 7))
    optimizer = build(settings, p=parameter)
    parameter.grad = torch.full((5, 7), 0.1)
    optimizer.step()
    return optimizer, parameter


def test_vectors_do_not_decay_and_embeddings_only_if_asked() -> None:
    matrix, vector = torch.ones(2, 2), torch.ones(2)
    plain = groups(OptimizerSettings(learning_rate=0.1, weight_decay=0.5))
    assert plain.options(NAMES[0], matrix) == plain.options(NAMES[1], matrix) == (0.1, 0.5)
    assert plain.options(NAMES[2], vector) == (0.1, 0.0)
    spared = groups(OptimizerSettings(learning_rate=0.1, weight_decay=0.5, no_decay=["embeddings"]))
    assert [spared.options(name, t)[1] for name, t in zip(NAMES, (matrix, matrix, vector), strict=False)] == [
        0,
        0.5,
        0.5,
    ]


def test_a_group_overrides_what_it_gives_and_follows_the_same_schedule() -> None:
    settings = OptimizerSettings(
        learning_rate=0.1,
        weight_decay=0.5,
        warmup_steps=4,
        groups={"mlp": GroupSettings(["a"], learning_rate=0.02), "norms": GroupSettings(["b"], weight_decay=0.3)},
    )
    parameters = {name: nn.Parameter(torch.ones(size)) for name, size in {"a": (2, 2), "b": (2,), "c": (2, 2)}.items()}
    optimizer = build(settings, **parameters)
    assert set_learning_rate(optimizer, 0, 100, settings) == pytest.approx(0.025)
    found = {
        name: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for name, p in parameters.items()
        if any(p is member for member in group["params"])
    }
    assert found == {"a": (0.005, 0.5), "b": (0.025, 0.3), "c": (0.025, 0.5)}
    assert ParameterGroups(settings, parameters, ()).describe() == [
        "optimizer.groups.mlp: 1 parameter with learning_rate 0.02",
        "optimizer.groups.norms: 1 parameter with weight_decay 0.3",
    ]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"a": ["*.mpl.*"]},
            r"groups.a.parameters has '\*.mpl.\*', which matches no parameter of the model; .* embed.weight",
        ),
        ({"a": ["*.mlp.*"], "b": ["layers.0.*"]}, r"groups a and b both match layers.0.mlp.up.weight"),
    ],
)
def test_patterns_that_match_nothing_or_overlap_are_refused(chosen: dict[str, list[str]], message: str) -> None:
    settings = OptimizerSettings(groups={name: GroupSettings(p, learning_rate=1.0) for name, p in chosen.items()})
    with pytest.raises(SettingError, match=message):
        groups(settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "adamv"}, "optimizer.name is 'adamv', which is not known here; use one of adamw, adam,"),
        ({"name": "sgd", "betas": (0.9, 0.99)}, "optimizer.betas is given, but optimizer.name is sgd, which has none; remove it"),
        ({"name": "sgd", "epsilon": 1e-6}, "optimizer.epsilon is given"),
        ({"momentum": 0.5}, "optimizer.momentum is given, but optimizer.name is adamw"),
        ({"schedule": "linear", "decay_share": 0.5}, "optimizer.decay_share is given"),
        ({"schedule": "constant", "final_share": 0.0}, "optimizer.final_share is given, but optimizer.schedule is constant"),
        ({"schedule": "wsd", "decay_share": 0.0}, "optimizer.decay_share must be above 0"),
        ({"groups": {"a": GroupSettings()}}, "optimizer.groups.a.parameters is empty"),
        ({"groups": {"a": GroupSettings(["*"])}}, "optimizer.groups.a changes nothing"),
        ({"groups": {"a": GroupSettings(["*"], max_norm=-1)}}, "optimizer.groups.a.max_norm must be at least 0"),
    ],
)  # fmt: skip
def test_settings_that_would_not_be_heeded_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        OptimizerSettings(**changes)


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_are_not_exact_on_shards_are_refused_by_name(name: str) -> None:
    with pytest.raises(SettingError, match=f"optimizer.name is {name}, which .* use one of adamw"):
        OptimizerSettings(name=name)


def test_every_named_optimizer_is_there() -> None:
    assert tuple(CLASSES) == OPTIMIZERS


@pytest.mark.parametrize("name", [*OPTIMIZERS, "sgd without momentum"])
def test_states_are_as_large_as_is_said_and_named_as_they_are(name: str) -> None:
    momentum = 0.0 if " " in name else OptimizerSettings.momentum
    settings = (
        OptimizerSettings(name=name.split()[0], momentum=momentum) if "sgd" in name else OptimizerSettings(name=name)
    )
    optimizer, parameter = stepped(settings)
    state = {key: value for key, value in optimizer.state[parameter].items() if value is not None}
    large = sum(value.nbytes for value in state.values() if value.numel() > 1)
    moments = len(optimizer_moments(settings.name, momentum))
    held = Holding(element_bytes=4, moments=moments).bytes_of([parameter.numel()])
    assert large + 2 * parameter.nbytes == held  # the parameter and its gradient
    empty = state_names(optimizer).empty(parameter)
    shapes, kept = ({key: (t.shape, t.dtype, t.device) for key, t in each.items()} for each in (empty, state))
    assert shapes == kept
