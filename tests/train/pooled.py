"""Training runs on processes that are started once and reused: what needs no launcher is tested on them."""

from __future__ import annotations

import json
import resource
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from infinipipe.runtime import Batch
from infinipipe.runtime.pool import WorkerPool
from infinipipe.train.job import Job
from infinipipe.train.leader import Leader
from infinipipe.train.loop import Run
from infinipipe.train.settings import ParallelSettings, Settings

Record = dict[str, Any]


class Workers:
    """Four processes, started anew after a run in which one of them failed."""

    size = 4

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None

    def run(self, settings: Settings, *, largest_file: int | None = None, evaluation_fails: bool = False) -> None:
        """Run to the end, unable to write files of more than ``largest_file`` bytes, or to evaluate. Raises ``WorkerError``."""
        if self._pool is None:
            self._pool = WorkerPool(self.size)
        try:
            assert self._pool.run(execute, settings, largest_file, evaluation_fails) == [0] * self.size
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def refuse(leader: Leader, chosen: list[int]) -> Batch:
    """A fault in the place of :meth:`Leader.held_out_batch`."""
    raise ValueError("the held-out sequences are refused")


def execute(rank: int, settings: Settings, largest_file: int | None, evaluation_fails: bool) -> int:
    """One worker's part of a run."""
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    job = Job.among(range(settings.parallel.num_processes), torch.device("cpu"))
    fault = mock.patch.object(Leader, "held_out_batch", refuse) if evaluation_fails else nullcontext()
    with fault:
        return Run(job, settings, "text: kept").execute()


def change(settings: Settings, layout: tuple[int, int, int], output: Path, **changes: Any) -> Settings:
    """Settings with another layout (replicas, stages, sequence), output and changes to the loop's settings.

    Without planning ahead: processes of a pool may have no children.
    """
    replicas, stages, sequence = layout
    parallel = replace(settings.parallel, replicas=replicas, stages=stages, sequence_parallel=sequence)
    return replace(
        settings,
        parallel=parallel,
        plan=replace(settings.plan, ahead=0),
        train=replace(settings.train, output=str(output), evaluate_every=0, **changes),
    )


def with_parallel(settings: Settings, **changes: Any) -> Settings:
    """Settings with changes to the processes."""
    parallel: ParallelSettings = replace(settings.parallel, **changes)
    return replace(settings, parallel=parallel)


def run(pool: Workers, settings: Settings) -> list[Record]:
    """Train on the pool; the steps' records of the whole run, those before a resume included."""
    pool.run(settings)
    return read_records(settings)


def read_records(settings: Settings) -> list[Record]:
    """The records of all steps of a run."""
    lines = (Path(settings.train.output) / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == "step"]


def losses(records: list[Record]) -> list[float]:
    return [record["loss"] for record in records]
