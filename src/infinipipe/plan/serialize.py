"""Plans as versioned JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinipipe.files import parse_json, write_beside
from infinipipe.plan.placement import ONE_EACH, Placement
from infinipipe.plan.types import Action, Chunk, Pipeline, Plan, PlanError, ReplicaPlan, Slice

VERSION = 1


def _content(plan: Plan) -> dict[str, Any]:
    placement = plan.placement
    placed = {} if placement.is_plain else {"placement": [list(parts) for parts in placement.parts]}
    return {
        "version": VERSION,
        "stage_layers": list(plan.stage_layers),
        **placed,
        "lengths": list(plan.lengths),
        "replicas": [
            {
                "pipelines": [
                    [[[s.sequence, s.start, s.stop] for s in chunk.slices] for chunk in pipeline.chunks]
                    for pipeline in replica.pipelines
                ],
                "actions": [" ".join(map(str, actions)) for actions in replica.actions],
                "recompute": [list(layers) for layers in replica.recompute],
            }
            for replica in plan.replicas
        ],
    }


def plan_hash(plan: Plan) -> str:
    """SHA-256, in hexadecimal, of the plan's canonical JSON without its metadata."""
    text = json.dumps(_content(plan), separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def to_json(plan: Plan) -> str:
    """The plan as JSON text; ``from_json`` reads it back."""
    return json.dumps(_content(plan) | {"metadata": dict(plan.metadata)}, separators=(",", ":"))


def _integers(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise PlanError(f"{name} must be a list of whole numbers")
    return tuple(value)


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise PlanError(f"{name} must be a list")
    return value


def _field(data: Mapping[str, Any], key: str, name: str) -> Any:
    if not isinstance(data, dict) or key not in data:
        raise PlanError(f"{name} has no field {key!r}")
    return data[key]


def _slice(value: object, lengths: tuple[int, ...], name: str) -> Slice:
    numbers = _integers(value, name)
    if len(numbers) != 3:
        raise PlanError(f"{name} must be [sequence, start, stop]")
    sequence, start, stop = numbers
    if not 0 <= sequence < len(lengths):
        raise PlanError(f"{name} names sequence {sequence}, but the batch has {len(lengths)} sequences")
    return Slice(sequence, start, stop, lengths[sequence])


def _placement(data: Mapping[str, Any]) -> Placement:
    """The placement that a plan names; without a part if it names none. Raises ``PlanError`` for what is none."""
    if "placement" not in data:
        return ONE_EACH
    rows = _list(data["placement"], "placement")
    placement = Placement(tuple(_integers(row, f"placement[{i}]") for i, row in enumerate(rows)))
    if (fault := placement.fault()) is not None:
        raise PlanError(fault)
    return placement


def _replica(data: Mapping[str, Any], lengths: tuple[int, ...], placement: Placement, name: str) -> ReplicaPlan:
    pipelines = []
    for i, pipeline in enumerate(_list(_field(data, "pipelines", name), f"{name}.pipelines")):
        chunks = []
        for j, chunk in enumerate(_list(pipeline, f"{name}.pipelines[{i}]")):
            where = f"{name}.pipelines[{i}][{j}]"
            slices = _list(chunk, where)
            chunks.append(Chunk(tuple(_slice(s, lengths, f"{where}[{k}]") for k, s in enumerate(slices))))
        pipelines.append(Pipeline(tuple(chunks)))
    actions = []
    for i, line in enumerate(_list(_field(data, "actions", name), f"{name}.actions")):
        if not isinstance(line, str):
            raise PlanError(f"{name}.actions[{i}] must be a text such as 'F0 F1 B1 B0'")
        actions.append(tuple(Action.parse(word) for word in line.split()))
    rows = _list(_field(data, "recompute", name), f"{name}.recompute")
    recompute = tuple(_integers(row, f"{name}.recompute[{i}]") for i, row in enumerate(rows))
    return ReplicaPlan(tuple(pipelines), tuple(actions), recompute, placement)


def from_json(text: str) -> Plan:
    """Read a plan. Raises ``PlanError`` for anything malformed; structure is checked by ``Plan.validate``."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise PlanError(f"the plan is not JSON: {error}") from None
    version = _field(data, "version", "the plan")
    if version != VERSION:
        raise PlanError(f"the plan has version {version!r}; this release reads version {VERSION}")
    lengths = _integers(_field(data, "lengths", "the plan"), "lengths")
    replicas = _list(_field(data, "replicas", "the plan"), "replicas")
    placement = _placement(data)
    metadata = data.get("metadata", {})
    if not isinstance(metadata, dict):
        raise PlanError("metadata must be an object")
    return Plan(
        stage_layers=_integers(_field(data, "stage_layers", "the plan"), "stage_layers"),
        lengths=lengths,
        replicas=tuple(_replica(replica, lengths, placement, f"replicas[{i}]") for i, replica in enumerate(replicas)),
        metadata=metadata,
    )


def save(plan: Plan, path: str | Path) -> None:
    """Write the plan as JSON, atomically. Raises ``WriteError``."""
    write_beside(path, (to_json(plan) + "\n").encode())


def load(path: str | Path) -> Plan:
    """Read a plan file. Raises ``PlanError`` naming the file."""
    try:
        return from_json(Path(path).read_text())
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not a text file") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
