"""Hugging Face checkpoints: a stage reads just its own tensors, and writes just its own shard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def _files_by_tensor(directory: Path) -> dict[str, Path]:
    """Which file of a checkpoint holds which tensor. Raises ``ValueError``."""
    index = directory / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{index} is not a safetensors index: {error}") from None
        return {name: directory / file for name, file in weight_map.items()}
    single = directory / SINGLE
    if not single.is_file():
        raise ValueError(f"{directory} has neither {SINGLE} nor {INDEX}; give a checkpoint in safetensors form")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise ValueError(f"{single} is not a safetensors file: {error}") from None


def read_tensors(model: nn.Module, directory: Path, *, aliases: Mapping[str, str] | None = None) -> None:
    """Fill the model's parameters and persistent buffers from ``directory``, one tensor at a time.

    A tensor that the checkpoint lacks is taken under the name that ``aliases`` gives it. Raises ``ValueError`` naming a
    tensor that is missing or has another shape.
    """
    files = _files_by_tensor(directory)
    targets = dict(model.state_dict(keep_vars=True))
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for name in targets:
        source = name if name in files else (aliases or {}).get(name, name)
        if source not in files:
            raise ValueError(f"the checkpoint {directory} has no tensor {name!r}, which the model needs")
        by_file.setdefault(files[source], []).append((name, source))
    for path, names in by_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name, source in names:
                    _copy(targets[name], file.get_tensor(source), name, path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read {path}: {error}") from None


def _copy(target: Tensor, tensor: Tensor, name: str, path: Path) -> None:
    if target.shape != tensor.shape:
        raise ValueError(f"{path}: {name} has shape {tuple(tensor.shape)}, but the model needs {tuple(target.shape)}")
    with torch.no_grad():
        target.copy_(tensor)


def shard_name(index: int, count: int) -> str:
    """File name of shard ``index``, counted from 0, of ``count``."""
    return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_shard(tensors: Mapping[str, Tensor], directory: Path, index: int, count: int) -> dict[str, int]:
    """Write one stage's tensors as a shard; returns the bytes of each tensor, for :func:`write_index`."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / shard_name(index, count), metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in contiguous.items()}


def write_index(sizes: Sequence[Mapping[str, int]], directory: Path) -> None:
    """Write the index over shards whose tensors :func:`write_shard` returned, in order; none for a single shard."""
    if len(sizes) == 1:
        return
    weight_map = {name: shard_name(i, len(sizes)) for i, shard in enumerate(sizes) for name in shard}
    total = sum(sum(shard.values()) for shard in sizes)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
