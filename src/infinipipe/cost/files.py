"""Cost files: an analytic cost model as versioned JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infinipipe.cost.analytic import AnalyticCost, Link, PassTime
from infinipipe.cost.memory import MemoryUse, WorkingSet
from infinipipe.cost.shape import CostError, ModelShape
from infinipipe.files import parse_json, write_beside
from infinipipe.plan import Placement

VERSION = 2
_PARTS: dict[type, dict[str, type]] = {
    AnalyticCost: {
        "forward": PassTime,
        "backward": PassTime,
        "backward_input": PassTime,
        "backward_weight": PassTime,
        "recompute": PassTime,
        "memory": MemoryUse,
        "message": Link,
        "all_to_all": Link,
        "placement": Placement,
        "shape": ModelShape,
    },
    MemoryUse: {"backward": WorkingSet, "backward_input": WorkingSet},
}
"""Fields that are objects of their own."""
_OPTIONAL: dict[type, tuple[str, ...]] = {AnalyticCost: ("backward_input", "backward_weight", "recompute", "shape")}
LARGEST = 1e15
"""Beyond any coefficient, and small enough that times and bytes of a step can be computed."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "float": (_is_number, f"a number of at most {LARGEST:g}"),
    "int": (_is_count, f"a whole number from 0 to {LARGEST:g}"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "a text"),
}
"""Whether a value of a field of that type will do, and what it must be, in words."""


def save_cost(cost: AnalyticCost, path: str | Path) -> None:
    """Write the cost model as JSON, atomically. Raises ``WriteError``."""
    write_beside(path, (json.dumps({"version": VERSION} | dataclasses.asdict(cost), indent=2) + "\n").encode())


def load_cost(path: str | Path) -> AnalyticCost:
    """Read a cost file. Raises ``CostError`` naming the file and the field."""
    try:
        data = parse_json(Path(path).read_text())
    except OSError as error:
        raise CostError(f"cannot read the cost file {path}: {error.strerror}") from None
    except ValueError:
        raise CostError(f"the cost file {path} is not JSON") from None
    if not isinstance(data, dict) or data.pop("version", None) != VERSION:
        raise CostError(f"the cost file {path} is not of version {VERSION}")
    cost: AnalyticCost = _build(AnalyticCost, data, str(path), f"{path}: ")
    if cost.shape is not None and cost.shape.layers != sum(cost.stage_layers):
        raise CostError(
            f"{path}: shape.layers is {cost.shape.layers}, but stage_layers {list(cost.stage_layers)} add up to "
            f"{sum(cost.stage_layers)}; make them equal"
        )
    return cost


def _build(kind: type, data: object, where: str, prefix: str) -> Any:
    """An object of that kind from its fields; ``where`` it is, and what to put before a field's name, are for errors."""
    if not isinstance(data, dict):
        raise CostError(f"{where} must be an object")
    for name, inner in _PARTS.get(kind, {}).items():
        if name in data and not (data[name] is None and name in _OPTIONAL.get(kind, ())):
            data[name] = _build(inner, data[name], f"{prefix}{name}", f"{prefix}{name}.")
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
    for name, value in data.items():
        wanted = str(fields[name].type)
        if wanted == "tuple[int, ...]":
            if not isinstance(value, list) or not all(_is_count(item) for item in value):
                raise CostError(f"{prefix}{name} must be a list of whole numbers from 0 to {LARGEST:g}")
            data[name] = tuple(value)
        if wanted == "tuple[tuple[int, ...], ...]":
            if not isinstance(value, list) or not all(
                isinstance(row, list) and all(map(_is_count, row)) for row in value
            ):
                raise CostError(f"{prefix}{name} must be a list of lists of whole numbers from 0 to {LARGEST:g}")
            data[name] = tuple(map(tuple, value))
        if wanted in _CHECKS and not _CHECKS[wanted][0](value):
            raise CostError(f"{prefix}{name} is {str(value)[:40]!r}; it must be {_CHECKS[wanted][1]}")
    try:
        return kind(**data)
    except CostError as error:
        raise CostError(f"{prefix}{error}") from None
