"""Messages that take as long as modelled."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from infinipipe.plan import Channel
from infinipipe.runtime.transport import Incoming, Transport

MessageSeconds = Mapping[int, float]
"""Seconds of a message of so many tokens; 0 for other numbers."""


class ModelledTransport:
    """A transport whose messages arrive no sooner than over modelled links.

    As in :class:`infinipipe.simulate.Engine`, a transfer starts when its send and its receive are both posted, one at a time on
    each channel. The sender's clock, which processes of one machine share, travels as the first number of a
    float64 message.
    """

    def __init__(self, transport: Transport, seconds: MessageSeconds) -> None:
        self._transport = transport
        self._seconds = seconds
        self._links: dict[Channel, _Link] = defaultdict(_Link)

    def receive(self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Incoming:
        incoming = self._transport.receive(channel, shape, dtype, device)
        return _Modelled(incoming, self._links[channel], self._seconds.get(shape[0], 0.0))

    def send(self, channel: Channel, tensor: Tensor) -> None:
        stamped = tensor.clone()
        stamped.view(-1)[0] = time.monotonic()
        self._transport.send(channel, stamped)

    def finish(self) -> None:
        self._transport.finish()


class _Link:
    """One channel, as its receiver sees it: when the last message came."""

    def __init__(self) -> None:
        self.free = 0.0


class _Modelled:
    def __init__(self, incoming: Incoming, link: _Link, seconds: float) -> None:
        self._incoming = incoming
        self._link = link
        self._seconds = seconds
        self._posted = time.monotonic()
        self._arrival: float | None = None

    def ready(self) -> bool:
        return self._incoming.ready() and self._arrives() <= time.monotonic()

    def wait(self) -> Tensor:
        message = self._incoming.wait()
        time.sleep(max(0.0, self._arrives() - time.monotonic()))
        return message

    def _arrives(self) -> float:
        """When a message that is there would have come over the modelled link."""
        if self._arrival is None:
            sent = float(self._incoming.wait().view(-1)[0])
            self._arrival = self._link.free = max(sent, self._posted, self._link.free) + self._seconds
        return self._arrival
