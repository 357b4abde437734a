"""The processes of a job, and how they agree: one decides, all learn the result or that there is none."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from infinipipe.settings import SettingError
from infinipipe.train.environment import ProcessEnvironment
from infinipipe.train.errors import StoppedElsewhereError
from infinipipe.train.settings import ParallelSettings

PATIENCE = timedelta(days=1)
"""How long a process waits for another; a hang ends the job sooner, see :mod:`infinipipe.train.heartbeat`."""

T = TypeVar("T")
U = TypeVar("U")


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
    def start(cls, process: ProcessEnvironment, settings: ParallelSettings) -> Job:
        """Meet the other processes. Raises ``SettingError`` if there is no such device."""
        device = _device(process, settings)
        torch.set_num_threads(settings.threads)
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            rank=process.rank,
            world_size=process.world_size,
            timeout=PATIENCE,
        )
        return cls.among(range(process.world_size), device)

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
        return self.publish(work) if self.is_first else self.receive()

    def publish(self, work: Callable[[], T]) -> T:
        """Rank 0's side of :meth:`on_first`."""
        try:
            value = work()
        except ValueError as error:
            self._broadcast((None, str(error)))
            raise
        self._broadcast((value, None))
        return value

    def receive(self) -> Any:
        """The other ranks' side of :meth:`on_first`."""
        value, message = self._broadcast((None, None))
        if message is not None:
            raise StoppedElsewhereError(f"rank 0 stopped: {message}")
        return value

    def stop(self, error: ValueError) -> NoReturn:
        """End the job with an error that all ranks know: raised on rank 0, the others raise ``StoppedElsewhereError``."""
        if self.is_first:
            raise error
        raise StoppedElsewhereError(f"rank 0 stopped: {error}")

    def everywhere(self, work: Callable[[], T]) -> T:
        """Run ``work`` on all ranks; if it raises ``ValueError`` on some, the lowest of them raises it, and all stop."""
        value, error = _attempt(work)
        for rank, message in enumerate(self.gather_objects(None if error is None else str(error))):
            if message is not None:
                if rank == self.rank and error is not None:
                    raise error
                raise StoppedElsewhereError(f"rank {rank} stopped: {message}")
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

    def _broadcast(self, value: T) -> T:
        """Rank 0's ``value``."""
        shared: list[Any] = [value]
        dist.broadcast_object_list(shared, src=0, group=self.control)
        return cast(T, shared[0])


class OnFirst(ABC, Generic[T]):
    """Something that rank 0 alone has. All ranks hold one of these in its place, and say the same to it: rank 0 answers to all."""

    @staticmethod
    def make(job: Job, make: Callable[[], T]) -> OnFirst[T]:
        """What ``make`` returns on rank 0; a collective with the errors of :meth:`Job.on_first`."""
        return job.everywhere(lambda: _Here(job, make()) if job.is_first else _Elsewhere(job))

    @abstractmethod
    def then(self, make: Callable[[T], U]) -> OnFirst[U]:
        """Something that rank 0 makes of it; a collective with the errors of :meth:`Job.on_first`."""

    @abstractmethod
    def ask(self, question: Callable[[T], U]) -> U:
        """What ``question`` returns on rank 0, on all ranks; a collective with the errors of :meth:`Job.on_first`."""

    @abstractmethod
    def tell(self, order: Callable[[T], object]) -> None:
        """Have rank 0 do something with it; the others go on at once."""


class _Here(OnFirst[T]):
    """Rank 0's side."""

    def __init__(self, job: Job, thing: T) -> None:
        self._job, self._thing = job, thing

    def then(self, make: Callable[[T], U]) -> OnFirst[U]:
        return OnFirst.make(self._job, lambda: make(self._thing))

    def ask(self, question: Callable[[T], U]) -> U:
        return self._job.publish(lambda: question(self._thing))

    def tell(self, order: Callable[[T], object]) -> None:
        order(self._thing)


class _Elsewhere(OnFirst[T]):
    """The side of all other ranks."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def then(self, make: Callable[[T], U]) -> OnFirst[U]:
        other: OnFirst[U] = _Elsewhere(self._job)
        return self._job.everywhere(lambda: other)

    def ask(self, question: Callable[[T], U]) -> U:
        return cast(U, self._job.receive())

    def tell(self, order: Callable[[T], object]) -> None:
        pass


def _attempt(work: Callable[[], T]) -> tuple[T | None, ValueError | None]:
    try:
        return work(), None
    except ValueError as error:
        return None, error


def _device(process: ProcessEnvironment, settings: ParallelSettings) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", process.world_size))
    if settings.device == "cpu" or (settings.device == "auto" and count < local_size):
        return torch.device("cpu")
    if process.local_rank >= count:
        raise SettingError(
            f"parallel.device is cuda, but process {process.local_rank} of this machine has none of its {count} devices"
        )
    return torch.device("cuda", process.local_rank)
