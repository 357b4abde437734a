"""From a run's checkpoint to a model in Hugging Face form, in one process and without a process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig

from infinipipe.data.files import written_folder
from infinipipe.model import HubLayout, meta_model
from infinipipe.model.shards import write_index, write_shard
from infinipipe.train.assets import Provenance
from infinipipe.train.export import write_companions
from infinipipe.train.store import CheckpointError, CheckpointFolder, read_manifest

SHARD_BYTES = 4 * 10**9
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


def export(checkpoint: Path, output: Path, *, dtype: str = "", shard_bytes: int = SHARD_BYTES) -> None:
    """Write the weights of ``checkpoint`` to ``output``, which must not exist, one shard after another.

    In ``dtype``, or else in the one that the run's folder names; with them what goes along with the run's own export.
    Raises ``CheckpointError`` for a checkpoint that cannot be read, ``WriteError`` if ``output`` cannot be written.
    """
    manifest = read_manifest(checkpoint)
    if output.exists():
        raise CheckpointError(f"{output} exists; name a new folder")
    run = checkpoint.parent.parent
    provenance = Provenance.load(run)
    if provenance is None and not dtype:
        raise CheckpointError(
            f"{run} is no run's folder, so that it is not known what {checkpoint} is to be written in; name --dtype"
        )
    provenance = provenance or Provenance(source="", dtype=dtype, longest=0, corpus=[])
    provenance = replace(provenance, dtype=dtype or provenance.dtype)
    fields = {name: value for name, value in manifest.config.items() if name != "model_type"}
    config = AutoConfig.for_model(manifest.config["model_type"], **fields)
    model = meta_model(config)
    with written_folder(output) as beside:
        _write_shards(checkpoint, beside, HubLayout(model), getattr(torch, provenance.dtype), shard_bytes)
        write_companions(
            beside, run, config, type(model).__name__, provenance, step=manifest.step, settings=manifest.settings
        )


def _write_shards(checkpoint: Path, folder: Path, layout: HubLayout, dtype: torch.dtype, shard_bytes: int) -> None:
    """Write the weights shard after shard. Raises ``CheckpointError`` if they cannot be read, ``OSError`` if not written."""
    with _reading(checkpoint):
        shards = _shards(checkpoint, layout, dtype, shard_bytes)
    sizes = []
    for index, names in enumerate(shards):
        tensors = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in names.items()}
        with _reading(checkpoint), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
        plain = {_plain(name): tensor for name, tensor in tensors.items()}
        sizes.append(write_shard(layout.convert(plain, dtype), folder, index, len(shards)))
    write_index(sizes, folder)


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    """Within the context, what goes wrong is the checkpoint's fault."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, CheckpointException) as error:
        raise CheckpointError(f"the checkpoint {checkpoint} cannot be read: {' '.join(str(error).split())}") from None


def _shards(
    checkpoint: Path, layout: HubLayout, dtype: torch.dtype, shard_bytes: int
) -> list[dict[str, TensorStorageMetadata]]:
    """The weights and buffers of a checkpoint, in shards of at most so many bytes, or of what is converted together."""
    found = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    stored = {
        _plain(name): (name, meta)
        for name, meta in sorted(found.items())
        if name.startswith(_PREFIXES) and isinstance(meta, TensorStorageMetadata)
    }
    shards: list[dict[str, TensorStorageMetadata]] = [{}]
    room = shard_bytes
    for group in layout.groups(stored):
        size = sum(stored[name][1].size.numel() * dtype.itemsize for name in group)
        if shards[-1] and size > room:
            shards.append({})
            room = shard_bytes
        shards[-1] |= dict(stored[name] for name in group)
        room -= size
    return shards


def _plain(name: str) -> str:
    """Hugging Face's name of what a checkpoint stores."""
    return name.split(".", 1)[1]
