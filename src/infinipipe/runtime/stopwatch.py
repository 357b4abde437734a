"""Moments on a device's own time line, read as seconds on the process's monotonic clock."""

from __future__ import annotations

import time

import torch

Moment = float | torch.cuda.Event


class Stopwatch:
    """Marks moments without waiting for the device: on CUDA by events in the current stream, which count from a common origin."""

    def __init__(self, device: torch.device) -> None:
        self._origin: torch.cuda.Event | None = None
        self._origin_seconds = 0.0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._origin_seconds = time.monotonic()

    def mark(self) -> Moment:
        """This moment of the device."""
        if self._origin is None:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Moment) -> float:
        """When a moment was; on CUDA, waits until the device has come to it."""
        if isinstance(moment, float):
            return moment
        assert self._origin is not None
        moment.synchronize()
        return self._origin_seconds + self._origin.elapsed_time(moment) / 1000
