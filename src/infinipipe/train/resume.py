"""What other settings than a checkpoint's mean for the run that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infinipipe.cost import optimizer_moments
from infinipipe.train.optimizer_settings import GroupSettings, OptimizerSettings
from infinipipe.train.schedule import change_of_rate
from infinipipe.train.settings import Settings
from infinipipe.train.store import CheckpointError, Manifest


@dataclass(frozen=True)
class Earlier:
    """The settings of the run so far that decide its learning rate: ``train.steps`` and those of the optimizer."""

    steps: int
    optimizer: OptimizerSettings

    @classmethod
    def of(cls, manifest: Manifest) -> Earlier | None:
        """Those that a checkpoint has kept; ``None`` if it has none that can be read."""
        try:
            kept = yaml.safe_load(manifest.settings)
            return cls(kept["train"]["steps"], _optimizer(kept["optimizer"]))
        except (yaml.YAMLError, TypeError, KeyError, ValueError):
            return None


def _optimizer(kept: dict[str, Any]) -> OptimizerSettings:
    groups = {name: GroupSettings(**group) for name, group in kept.get("groups", {}).items()}
    return OptimizerSettings(**{**kept, "betas": tuple(kept["betas"]), "groups": groups})


def changes_on_resume(path: Path, manifest: Manifest, settings: Settings) -> list[str]:
    """What is to be said of settings that have changed since the checkpoint at ``path``.

    Raises ``CheckpointError`` if its optimizer's states are not those of the run's.
    """
    earlier, optimizer = Earlier.of(manifest), settings.optimizer
    if earlier is None:
        return []
    before, now = earlier.optimizer, optimizer
    kept, wanted = (optimizer_moments(each.name, each.momentum) for each in (before, now))
    if before.name != now.name and ("nadam" in (before.name, now.name) or kept != wanted):
        raise CheckpointError(
            f"the checkpoint {path} has the states of optimizer.name {before.name}, which are not those of {now.name}; set "
            f"optimizer.name to {before.name}, or start a run with train.resume never from a model that 'infinipipe export' writes"
        )
    if kept != wanted:
        raise CheckpointError(
            f"optimizer.momentum is {now.momentum:g}, but was {before.momentum:g} in the checkpoint {path}, whose states "
            f"{'have' if kept else 'lack'} it; set it to {before.momentum:g}"
        )
    lines = []
    if before.name != now.name:
        lines.append(f"optimizer.name was {before.name} and is {now.name}, which goes on from the same states")
    change = change_of_rate(manifest.step, (earlier.steps, before), (settings.train.steps, now))
    return [*lines, change] if change else lines


def require_same_model(path: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` if the checkpoint at ``path`` is of another model than ours, by their fields."""
    for name in sorted(saved.keys() | ours.keys()):
        if saved.get(name) != ours.get(name):
            raise CheckpointError(
                f"the checkpoint {path} is of another model: its {name} is {saved.get(name)}, not {ours.get(name)}; name "
                "another train.output, or set train.resume to never"
            )
