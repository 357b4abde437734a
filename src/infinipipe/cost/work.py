"""What a chunk's cost depends on, for one chunk (floats) or for many at once (arrays)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from infinipipe.plan import Chunk

FloatArray = NDArray[np.float64]
Number = TypeVar("Number", float, FloatArray)


@dataclass(frozen=True, slots=True)
class Work(Generic[Number]):
    """The features of a chunk, or of many.

    Attributes:
        tokens: all tokens.
        pairs: ``(C + s0)^2 - C^2`` of the first slice plus ``s^2`` of the others (Eq. 1): twice the causal attention.
        partial: tokens that belong to a slice of a cut sequence; their keys and values lie in the store.
        reach: tokens that the slice of a cut sequence attends to, its own included; 0 without one.
        slices: number of slices.
    """

    tokens: Number
    pairs: Number
    partial: Number
    reach: Number
    slices: Number


def chunk_work(chunk: Chunk) -> Work[float]:
    """The features of one chunk."""
    tokens = pairs = partial = reach = 0
    for piece in chunk.slices:
        tokens += piece.stop - piece.start
        pairs += piece.stop * piece.stop - piece.start * piece.start
    first = chunk.slices[0]
    if not first.is_whole:
        partial, reach = first.stop - first.start, first.stop
    return Work(float(tokens), float(pairs), float(partial), float(reach), float(len(chunk.slices)))


def larger(a: Number, b: Number) -> Number:
    """The larger of two floats, or of two arrays elementwise."""
    return (a + b + abs(a - b)) * 0.5


def chunks_work(chunks: Sequence[Chunk]) -> Work[FloatArray]:
    """The features of many chunks, each an array of shape (chunks,)."""
    counts = np.fromiter((len(chunk.slices) for chunk in chunks), np.int64, len(chunks))
    flat = [piece for chunk in chunks for piece in chunk.slices]
    start = np.fromiter((piece.start for piece in flat), np.float64, len(flat))
    stop = np.fromiter((piece.stop for piece in flat), np.float64, len(flat))
    first = np.cumsum(counts) - counts
    cut = np.fromiter((not chunk.slices[0].is_whole for chunk in chunks), np.float64, len(chunks))
    if not len(chunks):
        return Work(cut, cut, cut, cut, cut)
    return Work(
        tokens=np.add.reduceat(stop - start, first),
        pairs=np.add.reduceat(stop * stop - start * start, first),
        partial=(stop - start)[first] * cut,
        reach=stop[first] * cut,
        slices=counts.astype(np.float64),
    )
