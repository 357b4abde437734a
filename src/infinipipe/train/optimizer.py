"""Optimizers of torch by name, with parameters in groups; what is known of their states.

Only those are there that treat every element by itself: their steps on shards of parameters are those on whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from infinipipe.cost import optimizer_moments
from infinipipe.settings import SettingError
from infinipipe.train.optimizer_settings import GroupSettings, OptimizerSettings
from infinipipe.train.schedule import rate_share

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
FUSED = ("adamw", "adam")
"""Those that torch has as one kernel, for CPUs and CUDA, sharded or not."""
UNCOUNTED = ("sgd",)
"""Those that do not count their steps."""
NUMBERS = {"nadam": ("mu_product",)}
"""What is one number for each parameter, besides the count of steps."""
HIGHEST = "highest"
"""Key of a group's highest learning rate in an optimizer's groups."""


class ParameterGroups:
    """Which group every parameter of a model belongs to, on whatever stage it is.

    Args:
        names: of all parameters of the model, as they are stored.
        embeddings: those of them that embed tokens.

    Raises ``SettingError`` for a pattern that matches nothing, or a parameter that two groups match.
    """

    def __init__(self, settings: OptimizerSettings, names: Iterable[str], embeddings: Iterable[str]) -> None:
        self._settings = settings
        self._embeddings = frozenset(embeddings)
        self._group_of: dict[str, str] = {}
        known = sorted(names)
        for group, chosen in settings.groups.items():
            for pattern in chosen.parameters:
                matched = [name for name in known if fnmatchcase(name, pattern)]
                if not matched:
                    raise SettingError(
                        f"optimizer.groups.{group}.parameters has {pattern!r}, which matches no parameter of the model; "
                        f"parameters are named like {known[0]} and {known[-1]}"
                    )
                for name in matched:
                    other = self._group_of.setdefault(name, group)
                    if other != group:
                        raise SettingError(
                            f"optimizer.groups {other} and {group} both match {name}; let only one of them match it"
                        )

    def options(self, name: str, parameter: Tensor) -> tuple[float, float]:
        """The highest learning rate and the weight decay of a parameter, by the name under which it is stored."""
        settings, group = self._settings, self._of(name)
        rate = settings.learning_rate if group.learning_rate is None else group.learning_rate
        if group.weight_decay is not None:
            return rate, group.weight_decay
        spared = ("vectors" in settings.no_decay and parameter.ndim < 2) or (
            "embeddings" in settings.no_decay and name in self._embeddings
        )
        return rate, 0.0 if spared else settings.weight_decay

    def clipped_together(self, names: Mapping[str, str]) -> list[tuple[float, list[str]]]:
        """Most norm, 0 for without limit, of every set of parameters that are clipped together, and which of ``names`` are in it.

        The same sets in the same order on every stage. ``names`` are the stage's own, with those under which they are stored.
        """
        apart = [name for name, group in self._settings.groups.items() if group.max_norm is not None]
        sets = [
            (self._settings.max_norm, [own for own, name in names.items() if self._group_of.get(name) not in apart])
        ]
        for group in apart:
            members = [own for own, name in names.items() if self._group_of.get(name) == group]
            sets.append((self._settings.groups[group].max_norm or 0.0, members))
        return sets

    def describe(self) -> list[str]:
        """What every group has and gives, in words."""
        lines = []
        for group, chosen in self._settings.groups.items():
            given = [f"{name} {value:g}" for name, value in vars(chosen).items() if isinstance(value, (int, float))]
            count = sum(other == group for other in self._group_of.values())
            lines.append(f"optimizer.groups.{group}: {count} parameter{'s' * (count > 1)} with {', '.join(given)}")
        return lines

    def _of(self, name: str) -> GroupSettings:
        return self._settings.groups.get(self._group_of.get(name, ""), GroupSettings())


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings, groups: ParameterGroups
) -> torch.optim.Optimizer:
    """The optimizer of the settings over parameters by the names under which they are stored."""
    sorted_out: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        sorted_out.setdefault(groups.options(name, parameter), []).append(parameter)
    given = [
        {"params": members, "lr": rate, "weight_decay": decay, HIGHEST: rate}
        for (rate, decay), members in sorted_out.items()
    ]
    return CLASSES[settings.name](given, **_options(settings))


def _options(settings: OptimizerSettings) -> dict[str, Any]:
    """Options of the class of an optimizer."""
    options: dict[str, Any] = {"lr": settings.learning_rate}
    if settings.name == "sgd":
        options["momentum"] = settings.momentum
    else:
        options["eps"] = settings.epsilon
    if settings.name == "rmsprop":
        options["alpha"] = settings.betas[1]
    elif settings.name not in ("sgd", "adagrad"):
        options["betas"] = settings.betas
    if settings.name in ("nadam", "radam"):
        options["decoupled_weight_decay"] = True
    if settings.name in FUSED:
        options["fused"] = True
    return options


def set_learning_rate(
    optimizer: torch.optim.Optimizer, step: int, num_steps: int, settings: OptimizerSettings
) -> float:
    """Set the learning rate of ``step``, counted from 0, in every group; returns that of parameters without a group."""
    share = rate_share(step, num_steps, settings)
    for group in optimizer.param_groups:
        group["lr"] = group[HIGHEST] * share
    return settings.learning_rate * share


@dataclass(frozen=True)
class StateNames:
    """What an optimizer keeps of every parameter.

    Attributes:
        moments: tensors in the parameter's shape.
        numbers: tensors of one element.
        counts: whether it counts the steps.
        on_device: whether these numbers are beside the parameter, as fused kernels want them, or on the CPU.
    """

    moments: tuple[str, ...]
    numbers: tuple[str, ...]
    counts: bool
    on_device: bool

    def empty(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """States to be read into, as they are before the first step."""
        state = {name: torch.zeros_like(parameter) for name in self.moments}
        scalars = (*self.numbers, *(("step",) if self.counts else ()))
        device = parameter.device if self.on_device else torch.device("cpu")
        return state | {name: torch.zeros((), device=device) for name in scalars}


def state_names(optimizer: torch.optim.Optimizer) -> StateNames:
    """What an optimizer that :func:`build_optimizer` has made keeps."""
    name = next(name for name, kind in CLASSES.items() if type(optimizer) is kind)
    moments = optimizer_moments(name, optimizer.defaults.get("momentum", 0.0))
    return StateNames(moments, NUMBERS.get(name, ()), name not in UNCOUNTED, name in FUSED)
