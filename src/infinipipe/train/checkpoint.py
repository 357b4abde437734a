"""The Hugging Face checkpoint at the end of a run: every stage writes its own shard."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from infinipipe.model import Stage
from infinipipe.model.weights import write_index, write_shard
from infinipipe.runtime import Parameters
from infinipipe.train.job import Job


def save_checkpoint(
    directory: Path,
    job: Job,
    stage: Stage,
    parameters: Parameters,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Write weights, configuration and tokenizer so that ``from_pretrained`` loads them; ``tokenizer`` is rank 0's.

    Master weights are written. ``directory`` is replaced at the end, when all shards are there.
    """
    beside = directory.with_name(directory.name + ".tmp")
    if job.is_first:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    job.on_first(lambda: None)
    tensors = _tensors(stage, parameters)
    sizes = job.gather_objects(write_shard(tensors, beside, stage.index, stage.num_stages))
    if job.is_first:
        assert tokenizer is not None
        write_index(sizes, beside)
        config.architectures = [type(stage.model).__name__]
        config.dtype = next(parameters.named())[1].dtype
        config.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        shutil.rmtree(directory, ignore_errors=True)
        beside.rename(directory)
    job.on_first(lambda: None)


def _tensors(stage: Stage, parameters: Parameters) -> dict[str, Tensor]:
    """The stage's master weights and persistent buffers; a tied head is in the first stage's shard alone."""
    tensors: dict[str, Tensor] = dict(parameters.named())
    buffers = dict(stage.model.named_buffers())
    tensors |= {name: tensor for name, tensor in stage.model.state_dict().items() if name in buffers}
    if stage.is_last and not stage.is_first and stage.tied_parameter is not None:
        head = next(name for name, p in stage.model.named_parameters() if p is stage.tied_parameter)
        del tensors[head]
    return tensors
