"""Chunks of a fixed number of tokens, and the cutting and packing that the baselines share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from infinipipe.plan import Chunk, Slice, cut
from infinipipe.planner.chunking import Chunking, SliceTime, balanced_borders

Borders = Callable[[int], list[int]]
"""Inner borders at which a sequence of a length is cut."""


def cut_and_pack(lengths: Sequence[int], sequences: Sequence[int], borders: Borders, token_capacity: int) -> Chunking:
    """Cut sequences at ``borders`` and pack whole ones, and tails with whole ones, first-fit by descending tokens."""
    cuts: list[list[Chunk]] = []
    rooms: list[int] = []
    contents: list[list[Slice]] = []
    wholes: list[int] = []
    for sequence in sequences:
        inner = borders(lengths[sequence])
        if not inner:
            wholes.append(sequence)
            continue
        slices = cut(sequence, lengths[sequence], inner)
        cuts.append([Chunk((piece,)) for piece in slices[:-1]])
        contents.append([slices[-1]])
        rooms.append(token_capacity - slices[-1].num_tokens)
    for sequence in sorted(wholes, key=lambda i: (-lengths[i], i)):
        length = lengths[sequence]
        place = next((i for i, room in enumerate(rooms) if room >= length), len(rooms))
        if place == len(rooms):
            rooms.append(token_capacity)
            contents.append([])
        contents[place].append(Slice(sequence, 0, length, length))
        rooms[place] -= length
    chunks = [Chunk(tuple(pieces)) for pieces in contents]
    for own, tail in zip(cuts, chunks, strict=False):
        own.append(tail)
    return Chunking(tuple(map(tuple, cuts)), tuple(chunks[len(cuts) :]))


def equal_tokens(size: int) -> Borders:
    """Cut every ``size`` tokens."""
    return lambda length: list(range(size, length, size))


def equal_times(target_seconds: float, slice_time: SliceTime) -> Borders:
    """Cut each sequence into the fewest slices of equal time that take at most ``target_seconds`` each."""

    def borders(length: int) -> list[int]:
        return balanced_borders(length, max(1, -int(-slice_time(0, length) // target_seconds)), slice_time)

    return borders


def terapipe_borders(
    target_seconds: float, slice_time: SliceTime, *, most_tokens: float = math.inf, cells: int = 128
) -> Borders:
    """TeraPipe's dynamic program: the cut of least total time whose slices take at most ``target_seconds``.

    Slices end on a grid of ``cells``, or of more where a cell would exceed ``most_tokens``. Since all cuts compute the same,
    least time is fewest slices, each with its fixed cost. A cell that alone takes longer than the target is a slice of its own.
    """

    def borders(length: int) -> list[int]:
        if slice_time(0, length) <= target_seconds:
            return []
        count = max(cells, math.ceil(length / most_tokens))
        edges = sorted({round(length * i / count) for i in range(count + 1)})
        fewest = [0] + [len(edges)] * (len(edges) - 1)
        came_from = [0] * len(edges)
        for stop in range(1, len(edges)):
            for start in range(stop - 1, -1, -1):
                if start < stop - 1 and slice_time(edges[start], edges[stop]) > target_seconds:
                    break
                if fewest[start] + 1 < fewest[stop]:
                    fewest[stop], came_from[stop] = fewest[start] + 1, start
        inner: list[int] = []
        place = came_from[len(edges) - 1]
        while place > 0:
            inner.append(edges[place])
            place = came_from[place]
        return inner[::-1]

    return borders


def chunk_sizes(longest: int, largest: int, most_slices: int) -> list[int]:
    """Fixed sizes to try, descending: ``largest``, its half, third, quarter, sixth, ... while the longest is not cut too finely."""
    sizes = [largest]
    parts = 2
    while -(-largest // parts) * most_slices >= longest and -(-largest // parts) < sizes[-1]:
        sizes.append(-(-largest // parts))
        parts += max(1, parts // 3)
    return sizes
