"""The Hugging Face model at the end of a run: every stage writes its own shard."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from infinipipe.model import Stage
from infinipipe.model.shards import write_index, write_shard
from infinipipe.runtime import Mesh, Parameters
from infinipipe.train.job import Job

T = TypeVar("T")


def save_model(
    directory: Path,
    job: Job,
    mesh: Mesh,
    stage: Stage,
    parameters: Parameters,
    config: PretrainedConfig,
    tokenizer: Path,
) -> None:
    """Write weights, configuration and the files of the folder ``tokenizer`` so that ``from_pretrained`` loads them.

    Master weights are written, those of a stage by one of its processes. ``directory`` is replaced at the end, when all shards
    are there. Raises ``ValueError`` if it cannot be written.
    """
    writes = mesh.replica == mesh.sequence == 0
    beside = directory.with_name(directory.name + ".tmp")

    def prepare() -> None:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)

    def complete(sizes: list[dict[str, int]]) -> None:
        write_index(sizes, beside)
        config.architectures = [type(stage.model).__name__]
        config.dtype = next(parameters.named())[1].dtype
        config.save_pretrained(beside)
        shutil.copytree(tokenizer, beside, dirs_exist_ok=True)
        shutil.rmtree(directory, ignore_errors=True)
        beside.rename(directory)

    job.on_first(lambda: _written(directory, prepare))
    tensors = _tensors(stage, parameters, writes=writes)
    sizes = job.everywhere(
        lambda: (
            _written(directory, lambda: write_shard(tensors, beside, mesh.stage, mesh.layout.stages))
            if writes
            else None
        )
    )
    shards = {index: shard for index, shard in job.gather_objects((mesh.stage, sizes)) if shard is not None}
    job.on_first(lambda: _written(directory, lambda: complete([shards[index] for index in sorted(shards)])))


def _written(directory: Path, work: Callable[[], T]) -> T:
    """What ``work`` returns. Raises ``ValueError`` where it cannot write."""
    try:
        return work()
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the model could not be written to {directory}: {error}") from None


def _tensors(stage: Stage, parameters: Parameters, *, writes: bool) -> dict[str, Tensor]:
    """The stage's whole master weights and persistent buffers, on the CPU, for the process that ``writes``.

    A collective of the stage's processes, which gather one tensor at a time. A weight that another stage owns is in its shard alone.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.named():
        if not stage.owns(name):
            continue
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if writes:
            tensors[name] = whole.cpu()
    buffers = dict(stage.model.named_buffers())
    tensors |= {name: tensor for name, tensor in stage.model.state_dict().items() if name in buffers}
    return tensors
