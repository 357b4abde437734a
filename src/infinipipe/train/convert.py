"""From a run's checkpoint to a model in Hugging Face form, in one process and without a process group."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig

from infinipipe.model.shards import write_index, write_shard
from infinipipe.train.store import CheckpointError, CheckpointFolder, read_manifest

SHARD_BYTES = 4 * 10**9
TOKENIZER = "tokenizer"
"""Folder of a run's tokenizer, beside its checkpoints."""
_PREFIXES = ("model.", "buffer.")


def find_checkpoint(path: Path) -> Path:
    """A checkpoint itself, or the newest valid one of a run's output. Raises ``CheckpointError`` if there is none."""
    folder = CheckpointFolder(path / "checkpoints", keep=1)
    if not folder.path.is_dir():
        read_manifest(path)
        return path
    found = folder.newest()
    if found is None:
        raise CheckpointError(f"{folder.path} has no valid checkpoint: {'; '.join(folder.invalid()) or 'it is empty'}")
    return found[0]


def export(checkpoint: Path, output: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the weights of ``checkpoint`` to ``output``, which must not exist, one shard after another.

    The tokenizer comes along if the run's folder has it. Raises ``CheckpointError``.
    """
    manifest = read_manifest(checkpoint)
    if output.exists():
        raise CheckpointError(f"{output} exists; name a new folder")
    beside = output.with_name(output.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        shards = _shards(checkpoint, shard_bytes)
        sizes = []
        for index, names in enumerate(shards):
            tensors = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in names.items()}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(tensors, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
            sizes.append(write_shard(_plain_names(tensors), beside, index, len(shards)))
    except (OSError, RuntimeError, KeyError, CheckpointException) as error:
        raise CheckpointError(f"the checkpoint {checkpoint} cannot be read: {' '.join(str(error).split())}") from None
    write_index(sizes, beside)
    fields = {name: value for name, value in manifest.config.items() if name != "model_type"}
    config = AutoConfig.for_model(manifest.config["model_type"], **fields)
    config.save_pretrained(beside)
    tokenizer = checkpoint.parent.parent / TOKENIZER
    if tokenizer.is_dir():
        shutil.copytree(tokenizer, beside, dirs_exist_ok=True)
    beside.rename(output)


def _shards(checkpoint: Path, shard_bytes: int) -> list[dict[str, TensorStorageMetadata]]:
    """The weights and buffers of a checkpoint, in shards of at most so many bytes, or of one tensor."""
    shards: list[dict[str, TensorStorageMetadata]] = [{}]
    room = shard_bytes
    for name, meta in sorted(dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items()):
        if not name.startswith(_PREFIXES) or not isinstance(meta, TensorStorageMetadata):
            continue
        size = meta.size.numel() * meta.properties.dtype.itemsize
        if shards[-1] and size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = meta
        room -= size
    return shards


def _plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under Hugging Face's names."""
    return {name.split(".", 1)[1]: tensor for name, tensor in tensors.items()}
