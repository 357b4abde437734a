"""Splits a global batch over data-parallel replicas by time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from infinipipe.planner.chunking import SliceTime


def split_by_time(lengths: Sequence[int], replicas: int, slice_time: SliceTime) -> list[list[int]]:
    """Sequence indices, ascending, of every replica: the longest first, each to the replica with the least time so far.

    Replicas may get unequal numbers of sequences, or none.
    """
    heap = [(0.0, replica) for replica in range(replicas)]
    parts: list[list[int]] = [[] for _ in range(replicas)]
    for sequence in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        seconds, replica = heapq.heappop(heap)
        parts[replica].append(sequence)
        heapq.heappush(heap, (seconds + slice_time(0, lengths[sequence]), replica))
    return [sorted(part) for part in parts]
