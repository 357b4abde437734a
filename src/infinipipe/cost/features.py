"""What a chunk's cost depends on, for one chunk (floats) or for many at once (arrays).

Attention depends on a layer's window: how many tokens a query attends to, its own included; 0 stands for all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from infinipipe.plan import Chunk

FloatArray = NDArray[np.float64]
Number = TypeVar("Number", float, FloatArray)


@dataclass(frozen=True, slots=True)
class Features(Generic[Number]):
    """The features of a chunk, or of many, at a layer, or the mean over layers.

    Attributes:
        tokens: all tokens.
        pairs: twice the pairs of a query and a key that it attends to, less the tokens. Without a window that is
            ``(C + s0)^2 - C^2`` of the first slice plus ``s^2`` of the others (Eq. 1).
        crossed: twice those pairs whose key lies in the context; ``2 C s0`` without a window.
        partial: tokens that belong to a slice of a cut sequence; their keys and values lie in the store.
        reach: tokens that the slice of a cut sequence attends to, its own included; 0 without one.
        resumed: 1 if a slice attends to a context, else 0.
        slices: number of slices.
    """

    tokens: Number
    pairs: Number
    crossed: Number
    partial: Number
    reach: Number
    resumed: Number
    slices: Number


def prefix_pairs(length: Number, window: int) -> Number:
    """``pairs`` of the first ``length`` tokens of a sequence: ``length^2`` up to the window, linear beyond."""
    if not window:
        return length * length
    # Of one number Python's own is several times faster, and cutting sequences into slices of equal time asks for millions.
    limited = np.minimum(length, window) if isinstance(length, np.ndarray) else min(length, window)
    return limited * limited + (2 * window - 1) * (length - limited)


def _features(
    tokens: Number, pairs: Number, start: Number, stop: Number, slices: Number, window: int
) -> Features[Number]:
    """The features from their sums; ``start`` and ``stop`` are those of the slice of a cut sequence, 0 without one."""
    partial = stop - start
    reach = np.minimum(stop, partial + (window - 1)) if window else stop
    return Features(
        tokens=tokens,
        pairs=pairs,
        crossed=prefix_pairs(stop, window) - prefix_pairs(start, window) - prefix_pairs(partial, window),
        partial=partial,
        reach=reach,
        resumed=np.minimum(reach - partial, 1.0),
        slices=slices,
    )


def chunk_features(chunk: Chunk, window: int = 0) -> Features[float]:
    """The features of one chunk at a layer with that window."""
    tokens = pairs = 0.0
    for piece in chunk.slices:
        tokens += piece.stop - piece.start
        pairs += prefix_pairs(piece.stop, window) - prefix_pairs(piece.start, window)
    first = chunk.slices[0]
    start, stop = (0.0, 0.0) if first.is_whole else (float(first.start), float(first.stop))
    return _features(tokens, pairs, start, stop, float(len(chunk.slices)), window)


def chunks_features(chunks: Sequence[Chunk], windows: Sequence[int] = (0,)) -> dict[int, Features[FloatArray]]:
    """The features of many chunks at layers with each of ``windows``, as arrays of shape (chunks,)."""
    counts = np.fromiter((len(chunk.slices) for chunk in chunks), np.int64, len(chunks))
    flat = [piece for chunk in chunks for piece in chunk.slices]
    start = np.fromiter((piece.start for piece in flat), np.float64, len(flat))
    stop = np.fromiter((piece.stop for piece in flat), np.float64, len(flat))
    first = np.cumsum(counts) - counts
    cut = np.fromiter((not chunk.slices[0].is_whole for chunk in chunks), np.float64, len(chunks))

    def total(values: FloatArray) -> FloatArray:
        return np.add.reduceat(values, first) if len(chunks) else cut

    tokens, slices = total(stop - start), counts.astype(np.float64)
    ends = start[first] * cut, stop[first] * cut
    return {
        window: _features(
            tokens, total(prefix_pairs(stop, window) - prefix_pairs(start, window)), *ends, slices, window
        )
        for window in windows
    }


def mean_features(by_window: Mapping[int, Features[Number]], windows: Sequence[int]) -> Features[Number]:
    """The mean of the features over layers with ``windows``, from those at each; any of them for no layers."""
    counts = Counter(windows)
    if len(counts) < 2:
        return next((by_window[window] for window in counts), next(iter(by_window.values())))
    shares = {window: count / len(windows) for window, count in counts.items()}

    def mean(name: str) -> Number:
        total: Number = sum(getattr(by_window[window], name) * share for window, share in shares.items())
        return total

    one = by_window[windows[0]]
    return dataclasses.replace(one, **{name: mean(name) for name in ("pairs", "crossed", "reach", "resumed")})
