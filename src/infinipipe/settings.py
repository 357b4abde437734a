"""What all settings share: the error that names a setting, and range checks. Imports no torch."""

from __future__ import annotations


class SettingError(ValueError):
    """A setting that cannot be; the message names the setting, its limit and what it was."""


def require_range(name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
    """Raise ``SettingError`` unless ``at_least <= value <= at_most``."""
    if at_least is not None and not value >= at_least:
        raise SettingError(f"{name} must be at least {at_least:g}, not {value:g}")
    if at_most is not None and not value <= at_most:
        raise SettingError(f"{name} must be at most {at_most:g}, not {value:g}")


def require_above(name: str, value: float, limit: float) -> None:
    """Raise ``SettingError`` unless ``value > limit``."""
    if not value > limit:
        raise SettingError(f"{name} must be above {limit:g}, not {value:g}")
