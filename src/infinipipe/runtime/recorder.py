"""Records when a stage's actions run and what memory they use."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from infinipipe.plan import Action


class Meter(Protocol):
    """Live bytes: :class:`~infinipipe.runtime.memory.MemoryMeter` on the CPU, :class:`AllocatorMeter` on CUDA."""

    @property
    def current(self) -> int:
        """Live bytes now."""
        ...

    @property
    def peak(self) -> int:
        """The most live bytes since the last :meth:`reset_peak`."""
        ...

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        ...


class Records(Protocol):
    """What the executor tells of every action: :class:`Recorder` or a stand-in."""

    def asks(self) -> None:
        """The stage has come to an action and waits for its input, if it needs one."""
        ...

    def starts(self) -> None:
        """The action's input is there."""
        ...

    def ends(self, action: Action) -> None:
        """The action is done."""
        ...


class AllocatorMeter:
    """Live bytes of a CUDA device as its allocator counts them, beyond those when it was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = torch.cuda.memory_allocated(device)

    @property
    def current(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._base

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._base

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


@dataclass(frozen=True, slots=True)
class Event:
    """An action as it was measured.

    Attributes:
        action: such as ``F12``.
        start, end: seconds on this process's monotonic clock; on CUDA the device's own, set against that clock.
        waited: seconds that it waited for its input before it started.
        before, peak, after: live bytes at its start, the most until its end, and at its end; 0 without a meter.
    """

    action: str
    start: float
    end: float
    waited: float
    before: int = 0
    peak: int = 0
    after: int = 0


Moment = float | torch.cuda.Event


class Recorder:
    """Records one step of an executor. It never waits for the device before the events are asked for.

    ``meter``, if given, has its peak reset at every action.
    """

    def __init__(self, device: torch.device, meter: Meter | None = None) -> None:
        self._meter = meter
        self._marks: list[tuple[Action, Moment, Moment, Moment, tuple[int, int, int]]] = []
        self._asked: Moment = 0.0
        self._started: Moment = 0.0
        self._before = 0
        self._origin: torch.cuda.Event | None = None
        self._origin_seconds = 0.0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._origin_seconds = time.monotonic()

    def asks(self) -> None:
        """The stage has come to an action and waits for its input, if it needs one."""
        self._asked = self._mark()

    def starts(self) -> None:
        """The action's input is there."""
        if self._meter is not None:
            self._meter.reset_peak()
            self._before = self._meter.current
        self._started = self._mark()

    def ends(self, action: Action) -> None:
        """The action is done."""
        end = self._mark()
        used = (0, 0, 0) if self._meter is None else (self._before, self._meter.peak, self._meter.current)
        self._marks.append((action, self._asked, self._started, end, used))

    def events(self) -> list[Event]:
        """All actions so far, in order; on CUDA, waits until the device has done them."""
        events = []
        for action, asked, started, ended, used in self._marks:
            start = self._seconds(started)
            events.append(Event(str(action), start, self._seconds(ended), start - self._seconds(asked), *used))
        return events

    def _mark(self) -> Moment:
        """This moment; on CUDA that at which the device comes here."""
        if self._origin is None:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        assert self._origin is not None
        moment.synchronize()
        return self._origin_seconds + self._origin.elapsed_time(moment) / 1000
