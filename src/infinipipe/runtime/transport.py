"""How messages pass between neighbouring stages: process groups, or mailboxes within one process."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from infinipipe.plan import Channel, Direction, Placement


class Incoming(Protocol):
    """A posted receive."""

    def ready(self) -> bool:
        """Whether :meth:`wait` would return without waiting."""
        ...

    def wait(self) -> Tensor:
        """The message, once it is there."""
        ...


class Transport(Protocol):
    """Messages of one stage. Each channel is first in, first out."""

    def receive(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Incoming:
        """Post a receive from the stage at the other end of the channel."""
        ...

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Start to send to the stage at the other end of the channel; never waits for the receiver."""
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


ChannelGroups = Mapping[tuple[Channel, int], dist.ProcessGroup]
"""Communicators by channel and the rank of the process that sends."""


def channel_groups(pipelines: Sequence[Sequence[int]], placement: Placement) -> ChannelGroups:
    """Communicators of all channels between stages of all pipelines, given as global ranks in the order of the stages.

    Each channel has its own: messages of several may pass between two processes in any order. A collective of the default process
    group: every process calls it with the same arguments, member or not.
    """
    groups = {}
    for ranks in pipelines:
        for channel, source, target in _links(placement):
            pair = sorted((ranks[source], ranks[target]))
            groups[channel, ranks[source]] = dist.new_group(pair)
    return groups


def _links(placement: Placement) -> Iterator[tuple[Channel, int, int]]:
    """The channels between stages, with the stages that send and receive."""
    for border in range(placement.num_parts - 1):
        for direction in Direction:
            channel = Channel(border, direction)
            source, target = placement.stage_of[channel.source], placement.stage_of[channel.target]
            if source != target:
                yield channel, source, target


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
    """Messages over ``torch.distributed``, with a communicator of its own for every channel.

    ``ranks`` are the global ranks of the stages in order, this process among them, ``groups`` what :func:`channel_groups` made.
    """

    def __init__(self, ranks: Sequence[int], groups: ChannelGroups, placement: Placement) -> None:
        self._ends: dict[Channel, tuple[int, int, dist.ProcessGroup]] = {}
        self._departures: dict[Channel, _Departures] = {}
        own = dist.get_rank()
        for channel, source, target in _links(placement):
            if own in (ranks[source], ranks[target]):
                self._ends[channel] = ranks[source], ranks[target], groups[channel, ranks[source]]
        self._sends: deque[Future[None]] = deque()
        self._polled: deque[tuple[dist.Work, Tensor]] = deque()

    def receive(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Incoming:
        source, _, group = self._ends[channel]
        buffer = torch.empty(shape, dtype=dtype, device=device)
        work = dist.irecv(buffer, src=source, group=group)
        assert work is not None
        return _Pending(work, buffer)

    def send(self, channel: Channel, tensor: Tensor) -> None:
        _, target, group = self._ends[channel]
        work = dist.isend(tensor, dst=target, group=group)
        assert work is not None
        if tensor.is_cuda:
            self._polled.append((work, tensor))
            while self._polled and self._polled[0][0].is_completed():
                self._polled.popleft()
        else:
            if channel not in self._departures:
                self._departures[channel] = _Departures()
            self._sends.append(self._departures[channel].hold(work, tensor))

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

    def __init__(self, incoming: dict[Channel, deque[_Letter]], unclaimed: dict[Channel, deque[Tensor]]) -> None:
        self._incoming, self._unclaimed = incoming, unclaimed

    def receive(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Incoming:
        letter = _Letter()
        if self._unclaimed[channel]:
            letter.tensor = self._unclaimed[channel].popleft()
        else:
            self._incoming[channel].append(letter)
        return letter

    def send(self, channel: Channel, tensor: Tensor) -> None:
        if self._incoming[channel]:
            self._incoming[channel].popleft().tensor = tensor
        else:
            self._unclaimed[channel].append(tensor)

    def finish(self) -> None:
        return None


def connect(num_stages: int) -> list[LocalTransport]:
    """Transports of ``num_stages`` stages within this process."""
    incoming: dict[Channel, deque[_Letter]] = defaultdict(deque)
    unclaimed: dict[Channel, deque[Tensor]] = defaultdict(deque)
    return [LocalTransport(incoming, unclaimed) for _ in range(num_stages)]
