"""Sequence grouping by dynamic programming (Eq. 14): which numbers of slices share a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def group(count: int, price: Callable[[int, int], float], pipeline_price: float) -> list[tuple[int, int]]:
    """Split classes ``0 .. count - 1`` into consecutive groups ``[first, last)`` of least total price.

    A group costs ``pipeline_price + price(first, last)``. Returns the groups in ascending order. With classes being the
    numbers of chunks in ascending order this is ``dp[i + 1] = min over k of dp[k] + delta + T_ckpt``.
    """
    least = [0.0] + [math.inf] * count
    first_of = [0] * (count + 1)
    for last in range(1, count + 1):
        for first in range(last):
            total = least[first] + pipeline_price + price(first, last)
            if total < least[last]:
                least[last], first_of[last] = total, first
    groups: list[tuple[int, int]] = []
    last = count
    while last > 0:
        groups.append((first_of[last], last))
        last = first_of[last]
    return groups[::-1]


def merge_small(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Join neighbouring classes of few chunks until at most ``most`` classes are left: ``[first, last)`` of each."""
    classes = [(index, index + 1) for index in range(len(sizes))]
    weights = list(sizes)
    while len(classes) > most:
        pair = min(range(len(classes) - 1), key=lambda i: weights[i] + weights[i + 1])
        classes[pair : pair + 2] = [(classes[pair][0], classes[pair + 1][1])]
        weights[pair : pair + 2] = [weights[pair] + weights[pair + 1]]
    return classes
