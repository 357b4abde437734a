"""Floating-point operations that a model's training asks for, whatever a plan makes of them: what MFU is told by.

The convention: an addition and a multiplication are two operations. Counted are products of matrices and attention, in the forward
once and in the backward twice; a query counts with the keys that it attends to, itself and those before it in the document, as far as
the layer's window reaches. Recompute, norms, activations, rotary embeddings, softmax and optimizer are not counted, nor padding,
of which there is none. Of experts those count that a token visits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from infinipipe.cost.shape import ModelShape

PASSES = 3
"""A forward, and a backward of twice its operations."""


def attended_pairs(length: int, window: int = 0) -> int:
    """Pairs of a query and a key that it attends to in a document of ``length`` tokens; ``window`` 0 is without limit."""
    reach = min(length, window) if window else length
    return reach * (reach + 1) // 2 + (length - reach) * reach


def step_flops(shape: ModelShape, lengths: Iterable[int]) -> int:
    """Operations of a training step over documents of ``lengths`` tokens, of which the head sees every one."""
    counted = Counter(lengths)
    tokens = sum(length * times for length, times in counted.items())
    matrices = sum(map(shape.work_of, range(shape.layers))) + shape.embedding_weights
    windows = Counter(map(shape.layer_window, range(shape.layers)))
    pairs = sum(
        layers * times * attended_pairs(length, window)
        for window, layers in windows.items()
        for length, times in counted.items()
    )
    return PASSES * (2 * matrices * tokens + 4 * shape.query_width * pairs)
