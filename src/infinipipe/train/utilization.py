"""How well a step used its devices: model FLOPs against their peak, and the share of time in which they were idle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from infinipipe.runtime import Event

_PEAKS = {
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "H200": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
}
"""Dense peaks of devices in bfloat16 and float32, operations a second, by a part of their name; from the vendor's data sheets."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """What a device can do at most in a second, if it is a known one."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peaks[dtype == torch.float32] for part, peaks in _PEAKS.items() if part in name), None)


@dataclass(frozen=True)
class Busy:
    """One process's actions in a step.

    Attributes:
        seconds: in which it computed.
        span: seconds from the step's start to the end of its last action.
    """

    seconds: float
    span: float

    @classmethod
    def of(cls, events: Sequence[Event], began: float) -> Busy:
        """From what was recorded since ``began``, on the clock of the events."""
        return cls(
            sum(event.end - event.start for event in events),
            max((event.end for event in events), default=began) - began,
        )


def idle_share(processes: Iterable[Busy]) -> float:
    """Share of all processes' time in which they computed nothing, until the last of them was done."""
    every = list(processes)
    whole = len(every) * max(busy.span for busy in every)
    return 1 - sum(busy.seconds for busy in every) / whole if whole else 0.0
