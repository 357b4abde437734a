"""How messages pass between neighbouring stages: process groups, or mailboxes within one process."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from infinipipe.plan import Direction


class Incoming(Protocol):
    """A posted receive."""

    def ready(self) -> bool:
        """Whether :meth:`wait` would return without waiting."""
        ...

    def wait(self) -> Tensor:
        """The message, once it is there."""
        ...


class Transport(Protocol):
    """Messages of one stage. Each direction is first in, first out; ``direction`` is the way that the message travels."""

    def receive(
        self, direction: Direction, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Incoming:
        """Post a receive from the stage before (``FORWARD``) or after (``BACKWARD``)."""
        ...

    def send(self, direction: Direction, tensor: Tensor) -> None:
        """Start to send to the stage after (``FORWARD``) or before (``BACKWARD``); never waits for the receiver."""
        ...

    def finish(self) -> None:
        """Wait until everything sent has left."""
        ...


class _Pending:
    def __init__(self, work: dist.Work, buffer: Tensor) -> None:
        self._work: dist.Work | None = work
        self._buffer = buffer

    def ready(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._buffer


PairGroups = Mapping[tuple[Direction, int, int], dist.ProcessGroup]
"""Communicators by direction, lower and upper rank."""


def pair_groups(pipelines: Sequence[Sequence[int]]) -> PairGroups:
    """Communicators between the neighbouring stages of all pipelines, given as global ranks in the order of the stages.

    A collective of the default process group: every process calls it with the same list, members or not.
    """
    groups = {}
    for ranks in pipelines:
        for lower, upper in itertools.pairwise(ranks):
            for direction in Direction:
                groups[direction, lower, upper] = dist.new_group([lower, upper])
    return groups


class _Departures:
    """Holds tensors that are being sent from the CPU, in their order, each until it has left and no longer.

    Gloo's sends are completed only when someone waits for them, so a thread does.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[None], dist.Work, Tensor]] = SimpleQueue()
        Thread(target=self._wait, daemon=True).start()

    def hold(self, work: dist.Work, tensor: Tensor) -> Future[None]:
        """Keep ``tensor`` until ``work`` is done, which the result says."""
        done: Future[None] = Future()
        self._queue.put((done, work, tensor))
        return done

    def _wait(self) -> None:
        while True:
            done, work, tensor = self._queue.get()
            failure = None
            try:
                work.wait()
            except Exception as error:
                failure = error
            del work, tensor
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)
            del done, failure


class ProcessGroupTransport:
    """Messages over ``torch.distributed``, with a communicator of its own for every direction and neighbour pair.

    ``ranks`` are the global ranks of the stages in order, this process among them, ``groups`` what :func:`pair_groups` made.
    """

    def __init__(self, ranks: Sequence[int], groups: PairGroups) -> None:
        self._ranks = list(ranks)
        self._stage = self._ranks.index(dist.get_rank())
        self._groups = groups
        self._departures = {direction: _Departures() for direction in Direction}
        self._sends: deque[Future[None]] = deque()
        self._polled: deque[tuple[dist.Work, Tensor]] = deque()

    def _neighbour(self, direction: Direction, *, sending: bool) -> tuple[int, dist.ProcessGroup]:
        step = 1 if (direction == Direction.FORWARD) == sending else -1
        other = self._stage + step
        lower = min(self._stage, other)
        return self._ranks[other], self._groups[direction, self._ranks[lower], self._ranks[lower + 1]]

    def receive(
        self, direction: Direction, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Incoming:
        source, group = self._neighbour(direction, sending=False)
        buffer = torch.empty(shape, dtype=dtype, device=device)
        work = dist.irecv(buffer, src=source, group=group)
        assert work is not None
        return _Pending(work, buffer)

    def send(self, direction: Direction, tensor: Tensor) -> None:
        target, group = self._neighbour(direction, sending=True)
        work = dist.isend(tensor, dst=target, group=group)
        assert work is not None
        if tensor.is_cuda:
            self._polled.append((work, tensor))
            while self._polled and self._polled[0][0].is_completed():
                self._polled.popleft()
        else:
            self._sends.append(self._departures[direction].hold(work, tensor))

    def finish(self) -> None:
        while self._polled:
            self._polled.popleft()[0].wait()
        while self._sends:
            self._sends.popleft().result()


class _Letter:
    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def ready(self) -> bool:
        return self.tensor is not None

    def wait(self) -> Tensor:
        assert self.tensor is not None, "a message is read before it was sent"
        return self.tensor


class LocalTransport:
    """Messages between stages that run in turn within one process; see :func:`connect`."""

    def __init__(self) -> None:
        self._incoming: dict[Direction, deque[_Letter]] = {direction: deque() for direction in Direction}
        self._unclaimed: dict[Direction, deque[Tensor]] = {direction: deque() for direction in Direction}
        self._outgoing: dict[Direction, LocalTransport] = {}

    def receive(
        self, direction: Direction, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Incoming:
        letter = _Letter()
        if self._unclaimed[direction]:
            letter.tensor = self._unclaimed[direction].popleft()
        else:
            self._incoming[direction].append(letter)
        return letter

    def send(self, direction: Direction, tensor: Tensor) -> None:
        target = self._outgoing[direction]
        if target._incoming[direction]:
            target._incoming[direction].popleft().tensor = tensor
        else:
            target._unclaimed[direction].append(tensor)

    def finish(self) -> None:
        return None


def connect(num_stages: int) -> list[LocalTransport]:
    """Transports of ``num_stages`` stages within this process."""
    transports = [LocalTransport() for _ in range(num_stages)]
    for lower, upper in itertools.pairwise(transports):
        lower._outgoing[Direction.FORWARD] = upper
        upper._outgoing[Direction.BACKWARD] = lower
    return transports
