"""The processes of a job, and how they agree: one decides, all learn the result or that there is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from infinipipe.plan import Plan, from_json, to_json
from infinipipe.runtime import Batch
from infinipipe.settings import SettingError
from infinipipe.train.place import Place
from infinipipe.train.report import StoppedElsewhereError
from infinipipe.train.settings import ParallelSettings

PATIENCE = timedelta(days=1)
"""How long a process waits for another; a hang ends the job sooner, see :mod:`infinipipe.train.progress`."""

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """This process among those of the job.

    Attributes:
        rank: its number; the process of rank 0 loads data and plans.
        world_size: processes of the job.
        device: where it computes.
        control: the communicator for what the processes tell each other outside of steps, over CPUs.
        background: another for what goes on beside the steps.
    """

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup
    background: dist.ProcessGroup

    @classmethod
    def start(cls, place: Place, settings: ParallelSettings) -> Job:
        """Meet the other processes. Raises ``SettingError`` if there is no such device."""
        device = _device(place, settings)
        torch.set_num_threads(settings.threads)
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            rank=place.rank,
            world_size=place.world_size,
            timeout=PATIENCE,
        )
        return cls.among(range(place.world_size), device)

    @classmethod
    def among(cls, ranks: Sequence[int], device: torch.device) -> Job:
        """The job of the first processes of those that have met already. A collective of all of them, members or not."""
        control = dist.new_group(list(ranks), backend="gloo", timeout=PATIENCE)
        background = dist.new_group(list(ranks), backend="gloo", timeout=PATIENCE)
        return cls(dist.get_rank(), len(ranks), device, control, background)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def close(self) -> None:
        """Part from the others once all have come this far."""
        dist.barrier(group=self.control)
        dist.destroy_process_group()

    def on_first(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on rank 0, on all ranks.

        A ``ValueError`` that it raises there is raised on rank 0; the others raise ``StoppedElsewhereError``.
        """
        value, error = _attempt(work) if self.is_first else (None, None)
        shared: list[Any] = [(value, None if error is None else str(error))]
        dist.broadcast_object_list(shared, src=0, group=self.control)
        result, message = shared[0]
        self._stop_on([message], error)
        return result

    def everywhere(self, work: Callable[[], T]) -> T:
        """Run ``work`` on all ranks; if it raises ``ValueError`` on some, the lowest of them raises it, and all stop."""
        value, error = _attempt(work)
        self._stop_on(self.gather_objects(None if error is None else str(error)), error)
        return cast(T, value)

    def check_equal(self, digest: str, what: str) -> None:
        """Raise ``RuntimeError`` on all ranks unless all have the same hexadecimal ``digest``."""
        own = torch.tensor([int(digest[:15], 16), -int(digest[:15], 16)])
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self.control)
        if int(own[0]) != -int(own[1]):
            raise RuntimeError(f"the processes disagree on {what}; rank {self.rank} has {digest}")

    def gather_objects(self, value: T) -> list[T]:
        """``value`` of every rank, in order, on all ranks."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.control)
        return gathered

    def share_step(self, make: Callable[[], tuple[Plan, Batch]]) -> tuple[Plan, Batch]:
        """The plan and the batch that ``make`` returns on rank 0, on all ranks, with the plans' hashes compared."""
        made: tuple[Plan, Batch] | None = None

        def text() -> str:
            nonlocal made
            made = make()
            return to_json(made[0])

        plan = from_json(self.on_first(text))
        self.check_equal(plan.hash, "the plan")
        if made is not None:
            flat = torch.stack([torch.cat(list(made[1].tokens)), torch.cat(list(made[1].labels))])
        else:
            flat = torch.empty(2, plan.num_tokens, dtype=torch.int64)
        dist.broadcast(flat, src=0, group=self.control)
        tokens, labels = (row.split(list(plan.lengths)) for row in flat)
        return plan, Batch(tokens, labels)

    def _stop_on(self, messages: Sequence[str | None], own: ValueError | None) -> None:
        """Raise if any rank has a message: on the lowest such rank its own error, on the others that it stopped."""
        for rank, message in enumerate(messages):
            if message is not None:
                if rank == self.rank and own is not None:
                    raise own
                raise StoppedElsewhereError(f"rank {rank} stopped: {message}")


def _attempt(work: Callable[[], T]) -> tuple[T | None, ValueError | None]:
    try:
        return work(), None
    except ValueError as error:
        return None, error


def _device(place: Place, settings: ParallelSettings) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", place.world_size))
    if settings.device == "cpu" or (settings.device == "auto" and count < local_size):
        return torch.device("cpu")
    if place.local_rank >= count:
        raise SettingError(
            f"parallel.device is cuda, but process {place.local_rank} of this machine has none of its {count} devices"
        )
    return torch.device("cuda", place.local_rank)
