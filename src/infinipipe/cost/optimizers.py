"""What optimizers keep of every parameter, by the names of ``torch.optim``. Imports no torch."""

from __future__ import annotations

_MOMENTS: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamax": ("exp_avg", "exp_inf"),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "radam": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
    "rmsprop": ("square_avg",),
    "sgd": ("momentum_buffer",),
}
OPTIMIZERS = tuple(_MOMENTS)
"""The optimizers that can be chosen: those that treat every element of a parameter by itself, so that sharding changes nothing."""


def optimizer_moments(name: str, momentum: float = 0.0) -> tuple[str, ...]:
    """The states that an optimizer keeps in the shape of every parameter; ``sgd`` has one only with ``momentum``."""
    return () if name == "sgd" and not momentum else _MOMENTS[name]
