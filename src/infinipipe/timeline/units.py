"""Seconds, bytes and axis ticks for readers."""

from __future__ import annotations

import math


def readable_seconds(seconds: float) -> str:
    """Seconds in the unit that leaves about three digits."""
    size = abs(seconds)
    if size >= 1 or size == 0:
        return f"{seconds:.{0 if size == 0 else 2 if size < 100 else 1}f} s"
    if size >= 1e-3:
        return f"{seconds * 1e3:.{2 if size < 0.1 else 1}f} ms"
    return f"{seconds * 1e6:.1f} µs"


def readable_bytes(size: float, *, round_up: bool = False) -> str:
    """Bytes in the largest unit that leaves at least 1; with ``round_up``, three decimals that a limit may be set to."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            number = size / 2**power
            if round_up:
                return f"{math.ceil(number * 1000) / 1000:.3f} {unit}"
            return f"{number:.{2 if number < 10 else 1}f} {unit}"
    return f"{size:.0f} B"


def ticks(end: float, most: int) -> tuple[list[tuple[float, str]], str]:
    """Positions and texts of at most about ``most`` round ticks over ``[0, end]`` seconds, and their unit."""
    if end <= 0:
        return [(0.0, "0")], "s"
    wanted = end / max(most, 1)
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= wanted * (1 - 1e-9))
    unit, factor = ("s", 1.0) if end >= 1 else ("ms", 1e3) if end >= 1e-3 else ("µs", 1e6)
    digits = max(0, -math.floor(math.log10(step * factor) + 1e-9))
    count = math.floor(end / step * (1 + 1e-9))
    return [(k * step, f"{k * step * factor:.{digits}f}") for k in range(count + 1)], unit
