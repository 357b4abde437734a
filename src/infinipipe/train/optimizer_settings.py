"""Settings of the optimizer, of the learning rate's course, and of groups of parameters. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from infinipipe.cost import OPTIMIZERS
from infinipipe.settings import SettingError, require_above, require_range

REFUSED = {
    "adafactor": "keeps rows and columns of a matrix together",
    "lbfgs": "needs the gradients of several evaluations of a step, and products over all parameters",
    "muon": "orthogonalises whole matrices",
    "sparseadam": "takes sparse gradients only",
}
"""Optimizers of ``torch.optim`` that are not exact on a shard of a parameter, or not with these gradients, and why."""
USERS: dict[str, tuple[str, ...]] = {
    "betas": ("adamw", "adam", "adamax", "nadam", "radam", "rmsprop"),
    "epsilon": tuple(name for name in OPTIMIZERS if name != "sgd"),
    "momentum": ("sgd",),
}
"""Which optimizers heed a setting that others have no use for."""


@dataclass(frozen=True)
class GroupSettings:
    """Parameters that are treated in another way: a table optimizer.groups.NAME. What is not given is as for all others.

    Attributes:
        parameters: patterns of Hugging Face names of parameters, such as *.mlp.*; * matches any characters, dots among them
        learning_rate: their highest; it takes the same course
        weight_decay: theirs
        max_norm: the norm of their gradients, taken by themselves, above which these are scaled down; 0 never does. They then do not count in the norm of the others
    """

    parameters: list[str] = field(default_factory=list)
    learning_rate: float | None = None
    weight_decay: float | None = None
    max_norm: float | None = None


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer, by its name in torch; the learning rate rises linearly, then follows its schedule.

    Attributes:
        name: adamw, adam, adamax, nadam, radam, adagrad, rmsprop or sgd, torch's own, fused where torch has it
        learning_rate: the highest
        schedule: after the warm-up the rate is constant, falls along a line or half a cosine to its final share at the end, or stays until decay_share of the steps are left and then falls along a line (wsd: warm-up, stable, decay)
        final_share: the lowest learning rate, which the end of train.steps approaches, as a share of the highest
        decay_share: share of train.steps in which wsd decays
        warmup_steps: steps in which it rises from 0
        betas: decay of the two moments; rmsprop has the second only
        epsilon: added to the root of the second moment
        momentum: of sgd
        weight_decay: decoupled from the gradient in adamw, nadam and radam; added to it in the others
        no_decay: what does not decay: vectors, which are the weights of norms and biases; embeddings, with the head that shares their weight
        max_norm: global gradient norm above which gradients are scaled down; 0 never does
        groups: parameters that differ in some of these, each a table optimizer.groups.NAME
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    final_share: float = 0.1
    decay_share: float = 0.1
    warmup_steps: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.1
    no_decay: list[Literal["vectors", "embeddings"]] = field(default_factory=lambda: ["vectors"])
    max_norm: float = 1.0
    groups: dict[str, GroupSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_name()
        require_above("optimizer.learning_rate", self.learning_rate, 0)
        require_range("optimizer.final_share", self.final_share, at_least=0, at_most=1)
        require_above("optimizer.decay_share", self.decay_share, 0)
        require_range("optimizer.decay_share", self.decay_share, at_most=1)
        require_range("optimizer.warmup_steps", self.warmup_steps, at_least=0)
        for beta in self.betas:
            require_range("optimizer.betas", beta, at_least=0, at_most=0.999999)
        require_above("optimizer.epsilon", self.epsilon, 0)
        require_range("optimizer.momentum", self.momentum, at_least=0, at_most=0.999999)
        require_range("optimizer.weight_decay", self.weight_decay, at_least=0)
        require_range("optimizer.max_norm", self.max_norm, at_least=0)
        for name, users in USERS.items():
            if self.name not in users:
                self._require_default(name, f"optimizer.name is {self.name}, which has none")
        if self.schedule != "wsd":
            self._require_default("decay_share", f"optimizer.schedule is {self.schedule}, which decays to the end")
        if self.schedule == "constant":
            self._require_default("final_share", "optimizer.schedule is constant, which stays at the highest rate")
        for name, group in self.groups.items():
            _check_group(f"optimizer.groups.{name}", group)

    def _check_name(self) -> None:
        known = f"use one of {', '.join(OPTIMIZERS)}"
        if self.name in REFUSED:
            raise SettingError(
                f"optimizer.name is {self.name}, which {REFUSED[self.name]}: that is not exact where processes share a "
                f"parameter; {known}"
            )
        if self.name not in OPTIMIZERS:
            raise SettingError(f"optimizer.name is {self.name!r}, which is not known here; {known}")

    def _require_default(self, name: str, why: str) -> None:
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        if getattr(self, name) != fields[name]:
            raise SettingError(f"optimizer.{name} is given, but {why}; remove it")


def _check_group(name: str, group: GroupSettings) -> None:
    if not group.parameters:
        raise SettingError(f"{name}.parameters is empty; name at least one pattern, such as *.mlp.*")
    if group.learning_rate is None and group.weight_decay is None and group.max_norm is None:
        raise SettingError(f"{name} changes nothing; give it a learning_rate, weight_decay or max_norm")
    for key in ("learning_rate", "weight_decay", "max_norm"):
        value = getattr(group, key)
        if value is not None:
            require_range(f"{name}.{key}", value, at_least=0)
