"""The Hugging Face model at the end of a run: every stage writes its own shard, in the layout that other programs expect."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PretrainedConfig

from infinipipe.model import HubLayout, Stage, covering, hub_fields, model_fields
from infinipipe.model.shards import write_index, write_shard
from infinipipe.runtime import Mesh, Parameters
from infinipipe.train.assets import ASSETS, Provenance
from infinipipe.train.card import CARD, model_card, read_records
from infinipipe.train.job import Job

T = TypeVar("T")


def save_model(
    directory: Path,
    job: Job,
    mesh: Mesh,
    stage: Stage,
    parameters: Parameters,
    config: PretrainedConfig,
    *,
    step: int,
    settings: str,
) -> None:
    """Write the model after ``step`` steps so that ``from_pretrained`` loads it; ``directory`` is in the run's folder.

    Weights are written in the dtype that the run's folder names, those of a stage by one of its processes; with them what
    :func:`write_companions` writes. ``directory`` is replaced at the end, when all shards are there. Raises ``ValueError`` if
    it cannot be written.
    """
    writes = mesh.replica == mesh.sequence == 0
    beside = directory.with_name(directory.name + ".tmp")
    run = directory.parent

    def prepare() -> Provenance:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        provenance = Provenance.load(run)
        assert provenance is not None, "kept since the run's start"
        return provenance

    def complete(sizes: list[dict[str, int]]) -> None:
        write_index(sizes, beside)
        write_companions(beside, run, config, type(stage.model).__name__, provenance, step=step, settings=settings)
        shutil.rmtree(directory, ignore_errors=True)
        beside.rename(directory)

    provenance = job.on_first(lambda: _written(directory, prepare))
    tensors = _tensors(stage, parameters, getattr(torch, provenance.dtype), writes=writes)
    sizes = job.everywhere(
        lambda: (
            _written(directory, lambda: write_shard(tensors, beside, mesh.stage, mesh.layout.stages))
            if writes
            else None
        )
    )
    shards = {index: shard for index, shard in job.gather_objects((mesh.stage, sizes)) if shard is not None}
    job.on_first(lambda: _written(directory, lambda: complete([shards[index] for index in sorted(shards)])))


def write_companions(
    folder: Path,
    run: Path,
    config: PretrainedConfig,
    architecture: str,
    provenance: Provenance,
    *,
    step: int,
    settings: str,
) -> None:
    """Write what goes with the weights: ``config.json``, the run's assets, a model card of the first ``step`` steps.

    Raises ``ValueError`` if transformers would not read the configuration as it is.
    """
    covered = covering(config, provenance.longest)
    fields = hub_fields(covered, architecture, provenance.dtype)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    read, meant = (model_fields(each.to_dict()) for each in (AutoConfig.from_pretrained(folder), covered))
    # Fields that only older readers know are kept by newer ones, and mean nothing to them.
    if name := next((name for name in sorted(meant) if read.get(name) != meant[name]), ""):
        raise ValueError(
            f"the configuration cannot be written: {name} would be read as {read.get(name)}, not {meant[name]}"
        )
    if (run / ASSETS).is_dir():
        shutil.copytree(run / ASSETS, folder, dirs_exist_ok=True)
    card = model_card(provenance, config.model_type, step, settings, read_records(run, step))
    (folder / CARD).write_text(card)


def _written(directory: Path, work: Callable[[], T]) -> T:
    """What ``work`` returns. Raises ``ValueError`` where it cannot write."""
    try:
        return work()
    except OSError as error:
        raise ValueError(f"the model could not be written to {directory}: {error}") from None


def _tensors(stage: Stage, parameters: Parameters, dtype: torch.dtype, *, writes: bool) -> dict[str, Tensor]:
    """The stage's whole master weights and persistent buffers, on the CPU, for the process that ``writes``.

    In the hub's layout and in ``dtype``. A collective of the stage's processes, which gather what is converted together at a
    time. A weight that another stage owns is in its shard alone.
    """
    masters: dict[str, Tensor] = {name: parameter for name, parameter in parameters.named() if stage.owns(name)}
    buffers = dict(stage.model.named_buffers())
    masters |= {name: tensor for name, tensor in stage.model.state_dict().items() if name in buffers}
    layout = HubLayout(stage.model)
    tensors: dict[str, Tensor] = {}
    for group in layout.groups(masters):
        whole = {name: _whole(masters[name]) for name in group}
        if writes:
            tensors |= layout.convert({name: tensor.cpu() for name, tensor in whole.items()}, dtype)
    return tensors


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
