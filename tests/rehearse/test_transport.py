"""When messages of modelled time arrive, by a clock of the tests' own."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor

from infinipipe.plan import Channel, Direction
from infinipipe.rehearse import transport
from infinipipe.rehearse.transport import ModelledTransport
from infinipipe.runtime.transport import Incoming

CHANNEL = Channel(0, Direction.FORWARD)


class Clock:
    """What the transport uses of :mod:`time`; it moves only when told to, or when someone sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Loop:
    """A transport to itself whose messages are there at once."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()

    def receive(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Incoming:
        return Received(self.sent)

    def send(self, channel: Channel, tensor: Tensor) -> None:
        self.sent.append(tensor)

    def finish(self) -> None: ...


class Received:
    def __init__(self, sent: deque[Tensor]) -> None:
        self._sent = sent
        self._message: Tensor | None = None

    def ready(self) -> bool:
        return self._message is not None or bool(self._sent)

    def wait(self) -> Tensor:
        if self._message is None:
            self._message = self._sent.popleft()
        return self._message


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(transport, "time", clock)
    return clock


def receive(link: ModelledTransport, tokens: int) -> Incoming:
    return link.receive(CHANNEL, (tokens, 2), torch.float64, torch.device("cpu"))


def send(link: ModelledTransport, tokens: int) -> None:
    link.send(CHANNEL, torch.zeros(tokens, 2, dtype=torch.float64))


def test_a_transfer_starts_when_both_ends_are_there(clock: Clock) -> None:
    link = ModelledTransport(Loop(), {4: 3.0})
    early = receive(link, 4)
    assert not early.ready()
    clock.now = 110.0
    send(link, 4)
    assert not early.ready()
    clock.now = 112.9
    assert not early.ready()
    clock.now = 113.0
    assert early.ready()
    send(link, 4)
    clock.now = 120.0
    assert not receive(link, 4).ready()


def test_messages_of_a_link_follow_each_other(clock: Clock) -> None:
    link = ModelledTransport(Loop(), {4: 3.0, 5: 1.0})
    incoming = [receive(link, 4), receive(link, 5), receive(link, 4)]
    for tokens in (4, 5, 4):
        send(link, tokens)
    arrivals = [(message.wait().shape[0], clock.now) for message in incoming]
    assert arrivals == [(4, 103.0), (5, 104.0), (4, 107.0)]


def test_messages_that_the_model_does_not_know_are_free(clock: Clock) -> None:
    link = ModelledTransport(Loop(), {})
    send(link, 4)
    assert receive(link, 4).ready()
