"""The sequence processor: workload-balanced chunking (section III-B, Algorithm 1)."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from infinipipe.cost.features import prefix_pairs
from infinipipe.plan import Chunk, Slice, cut

MANY_SEQUENCES = 1000
"""Sequences from which tiny ones are packed in bundles."""
BUNDLES_PER_CHUNK = 100
"""A bundle is at most this part of a chunk's tokens."""


@dataclass(frozen=True)
class SliceTime:
    """Seconds of a slice ``[start, stop)``: ``pair * (stop^2 - start^2) + token * (stop - start)``, and what layers with windows add.

    Attributes:
        pair: of the layers without a window, per unit of ``stop^2 - start^2``.
        token: per token.
        windows: ascending windows with their layers' seconds per unit of :func:`infinipipe.cost.features.prefix_pairs`.
    """

    pair: float
    token: float
    windows: tuple[tuple[int, float], ...] = ()

    def __call__(self, start: int, stop: int) -> float:
        seconds = self.pair * (stop * stop - start * start) + self.token * (stop - start)
        for window, pair in self.windows:
            seconds += pair * (prefix_pairs(stop, window) - prefix_pairs(start, window))
        return seconds

    def length_taking(self, seconds: float) -> float:
        """The length whose whole takes ``seconds``: the root of the quadratic that holds there, beyond all windows passed."""
        passed = [window for window, _ in self.windows if self(0, window) < seconds]
        origin = passed[-1] if passed else 0
        left = seconds - self(0, origin)
        pair = self.pair + sum(pair for window, pair in self.windows if window > origin)
        token = self.token + 2 * origin * pair
        token += sum(pair * (2 * window - 1) for window, pair in self.windows if window <= origin)
        if pair <= 0:
            return origin + left / token
        half = token / (2 * pair)
        return origin + left / pair / (half + math.sqrt(half * half + left / pair))


def balanced_borders(length: int, num_slices: int, slice_time: SliceTime) -> list[int]:
    """Inner borders, ascending, that cut ``length`` tokens into ``num_slices`` slices of equal time.

    Borders are whole tokens; where slices would be empty there are fewer of them.
    """
    total = slice_time(0, length)
    borders = {round(slice_time.length_taking(total * i / num_slices)) for i in range(1, num_slices)}
    return sorted(border for border in borders if 0 < border < length)


@dataclass
class Bucket:
    """A chunk in the making: at most one slice of a cut sequence, then whole sequences."""

    first: Slice | None = None
    seconds: float = 0.0
    tokens: int = 0
    wholes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, piece: Slice, slice_time: SliceTime) -> Bucket:
        """A bucket that starts with a slice."""
        return cls(piece, slice_time(piece.start, piece.stop), piece.num_tokens)

    def add(self, sequences: Sequence[int], tokens: int, seconds: float) -> None:
        """Put whole sequences in."""
        self.wholes.extend(sequences)
        self.tokens += tokens
        self.seconds += seconds

    def chunk(self, lengths: Sequence[int]) -> Chunk:
        wholes = tuple(Slice(i, 0, lengths[i], lengths[i]) for i in self.wholes)
        return Chunk(((self.first,) if self.first is not None else ()) + wholes)


class TokenOverflowError(ValueError):
    """A slice is longer than the token capacity of a chunk."""


def _bundles(
    sequences: Sequence[int], lengths: Sequence[int], slice_time: SliceTime, target_tokens: int
) -> list[tuple[list[int], int, float]]:
    """Sequences by descending length, with their tokens and seconds; of very many, the tiniest are tied together."""
    order = sorted(sequences, key=lambda i: (-lengths[i], i))
    size = target_tokens // BUNDLES_PER_CHUNK if len(order) > MANY_SEQUENCES else 0
    bundles: list[tuple[list[int], int, float]] = []
    for sequence in order:
        length = lengths[sequence]
        seconds = slice_time(0, length)
        if bundles and bundles[-1][1] + length <= size:
            members, tokens, total = bundles[-1]
            bundles[-1] = ([*members, sequence], tokens + length, total + seconds)
        else:
            bundles.append(([sequence], length, seconds))
    return bundles


def pack(
    buckets: list[Bucket],
    sequences: Sequence[int],
    lengths: Sequence[int],
    slice_time: SliceTime,
    *,
    target_seconds: float,
    target_tokens: int,
) -> list[Bucket]:
    """Put whole ``sequences`` into buckets within both targets; returns the buckets, new ones after the given.

    By descending time, each sequence goes into the bucket of least ``seconds / tokens`` that has room for both. If no
    bucket has room for its tokens, a new one opens; if some do but none has time left, the time target is loosened to
    the cheapest of *those*. (Loosening to the cheapest of all buckets, as Algorithm 1 is printed, need never end.)
    """
    buckets = list(buckets)
    most = len(buckets) + len(sequences)
    seconds, tokens = np.full(most, np.inf), np.full(most, np.iinfo(np.int64).max // 2)
    count = len(buckets)
    seconds[:count] = [bucket.seconds for bucket in buckets]
    tokens[:count] = [bucket.tokens for bucket in buckets]
    density = seconds / tokens
    for members, length, own in _bundles(sequences, lengths, slice_time, target_tokens):
        roomy = tokens[:count] <= target_tokens - length
        fitting = roomy & (seconds[:count] <= target_seconds - own)
        if fitting.any():
            place = int(np.where(fitting, density[:count], np.inf).argmin())
        elif roomy.any():
            place = int(np.where(roomy, seconds[:count], np.inf).argmin())
            target_seconds = float(seconds[place]) + own
        else:
            place, count = count, count + 1
            buckets.append(Bucket())
            seconds[place], tokens[place] = 0.0, 0
        buckets[place].add(members, length, own)
        seconds[place] += own
        tokens[place] += length
        density[place] = seconds[place] / tokens[place]
    return buckets


@dataclass(frozen=True)
class Chunking:
    """Chunks by role.

    Attributes:
        cut: for every cut sequence, its chunks in order; the last may be hybrid.
        batched: chunks of whole sequences alone.
    """

    cut: tuple[tuple[Chunk, ...], ...]
    batched: tuple[Chunk, ...]

    def by_splits(self) -> dict[int, list[Chunk]]:
        """``S[i]`` of section III-C: chunks of the sequences cut into ``i``, ascending ``i``; batched chunks are ``i = 1``."""
        groups: dict[int, list[Chunk]] = {1: list(self.batched)} if self.batched else {}
        for chunks in sorted(self.cut, key=len):
            groups.setdefault(len(chunks), []).extend(chunks)
        return groups

    def ordered(self) -> tuple[Chunk, ...]:
        """One pipeline of everything, sequences of more chunks first (section III-C)."""
        groups = self.by_splits()
        return tuple(chunk for splits in sorted(groups, reverse=True) for chunk in groups[splits])


def balanced_chunking(
    lengths: Sequence[int],
    sequences: Sequence[int],
    num_slices: int,
    slice_time: SliceTime,
    *,
    token_capacity: int,
) -> Chunking:
    """Algorithm 1: cut the longest of ``sequences`` into ``num_slices`` slices of equal time and all others to match.

    The borders of the longest are common to all: every sequence longer than the first border is cut at them; the time of its
    slices and the length of its first are the targets to which short sequences are packed, beside tails where they fit.
    Raises ``TokenOverflowError`` if the first slice exceeds ``token_capacity``.
    """
    longest = max(lengths[i] for i in sequences)
    common_borders = balanced_borders(longest, num_slices, slice_time)
    target_tokens = common_borders[0] if common_borders else longest
    if target_tokens > token_capacity:
        raise TokenOverflowError(
            f"{num_slices} slices of the longest sequence, {longest} tokens, start with one of {target_tokens} tokens, "
            f"more than the token capacity of {token_capacity}"
        )
    cuts: list[list[Bucket]] = []
    shorts: list[int] = []
    for sequence in sequences:
        length = lengths[sequence]
        if length <= target_tokens:
            shorts.append(sequence)
        else:
            slices = cut(sequence, length, [border for border in common_borders if border < length])
            cuts.append([Bucket.of(piece, slice_time) for piece in slices])
    tails = [buckets[-1] for buckets in cuts]
    packed = pack(
        tails,
        shorts,
        lengths,
        slice_time,
        target_seconds=slice_time(0, longest) / num_slices,
        target_tokens=target_tokens,
    )
    return _chunking(cuts, packed[len(tails) :], lengths)


def even_chunking(
    lengths: Sequence[int],
    sequences: Sequence[int],
    target_seconds: float,
    slice_time: SliceTime,
    *,
    token_limit: int,
) -> Chunking:
    """Cut each sequence into the fewest slices of equal time within the target, and pack short ones beside any slice.

    Every sequence has its own borders, so none ends in a small tail; ``target_seconds`` may exceed the time of the longest.
    A sequence whose first slice would exceed ``token_limit`` is cut more finely.
    """
    cuts: list[list[Bucket]] = []
    shorts: list[int] = []
    for sequence in sequences:
        length = lengths[sequence]
        number = max(1, math.ceil(slice_time(0, length) / target_seconds - 1e-9))
        if number == 1 and length <= token_limit:
            shorts.append(sequence)
            continue
        slices = cut(sequence, length, balanced_borders(length, number, slice_time))
        while slices[0].num_tokens > token_limit:
            number += 1
            slices = cut(sequence, length, balanced_borders(length, number, slice_time))
        cuts.append([Bucket.of(piece, slice_time) for piece in slices])
    open_buckets = [bucket for buckets in cuts for bucket in buckets]
    packed = pack(open_buckets, shorts, lengths, slice_time, target_seconds=target_seconds, target_tokens=token_limit)
    return _chunking(cuts, packed[len(open_buckets) :], lengths)


def ramp_chunks(
    lengths: Sequence[int],
    sequences: Sequence[int],
    targets: Sequence[float],
    slice_time: SliceTime,
    *,
    token_limit: int,
) -> tuple[list[Chunk], list[int]]:
    """Chunks of whole sequences that take at most each of ``targets`` seconds, and the sequences left over.

    The longest that fit go first; targets for which nothing is left yield no chunk.
    """
    left = sorted(sequences, key=lambda i: (lengths[i], -i))
    sizes = [lengths[i] for i in left]
    chunks: list[Chunk] = []
    for target in targets:
        bucket = Bucket()
        while True:
            fitting = min(
                slice_time.length_taking(max(target - bucket.seconds, 0.0)) + 1e-9, token_limit - bucket.tokens
            )
            place = bisect.bisect_right(sizes, fitting) - 1
            if place < 0:
                break
            length = sizes.pop(place)
            bucket.add([left.pop(place)], length, slice_time(0, length))
        if bucket.wholes:
            chunks.append(bucket.chunk(lengths))
    return chunks, left


def _chunking(cuts: Sequence[Sequence[Bucket]], batched: Sequence[Bucket], lengths: Sequence[int]) -> Chunking:
    return Chunking(
        tuple(tuple(bucket.chunk(lengths) for bucket in buckets) for buckets in cuts),
        tuple(bucket.chunk(lengths) for bucket in batched),
    )
