"""Cost files: an analytic cost model as versioned JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from infinipipe.cost.analytic import AnalyticCost, Link, MemoryUse, PassTime
from infinipipe.cost.shape import CostError, ModelShape

VERSION = 1
_PARTS: dict[str, type] = {
    "forward": PassTime,
    "backward": PassTime,
    "recompute": PassTime,
    "memory": MemoryUse,
    "message": Link,
    "all_to_all": Link,
    "shape": ModelShape,
}


def save_cost(cost: AnalyticCost, path: str | Path) -> None:
    """Write the cost model as JSON, atomically."""
    path = Path(path)
    beside = path.with_name(path.name + f".tmp{os.getpid()}")
    beside.write_text(json.dumps({"version": VERSION} | dataclasses.asdict(cost), indent=2) + "\n")
    beside.replace(path)


def load_cost(path: str | Path) -> AnalyticCost:
    """Read a cost file. Raises ``CostError`` naming the file and the field."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise CostError(f"cannot read the cost file {path}: {error.strerror}") from None
    except ValueError:
        raise CostError(f"the cost file {path} is not JSON") from None
    if not isinstance(data, dict) or data.pop("version", None) != VERSION:
        raise CostError(f"the cost file {path} is not of version {VERSION}")
    for name, kind in _PARTS.items():
        if data.get(name) is not None:
            data[name] = _build(kind, data[name], f"{path}: {name}")
    for name in ("stage_layers", "states"):
        if not isinstance(data.get(name), list) or not all(type(item) is int for item in data[name]):
            raise CostError(f"{path}: {name} must be a list of whole numbers")
        data[name] = tuple(data[name])
    cost: AnalyticCost = _build(AnalyticCost, data, str(path))
    return cost


def _build(kind: type, data: object, where: str) -> Any:
    if not isinstance(data, dict):
        raise CostError(f"{where} must be an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise CostError(f"{where} has an unknown field {unknown[0]!r}")
    needed = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in needed if name not in data]
    if missing:
        raise CostError(f"{where} has no field {missing[0]!r}")
    if kind in (PassTime, Link, MemoryUse):
        for name, value in data.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CostError(f"{where}.{name} is {value!r}; it must be a number")
    return kind(**data)
