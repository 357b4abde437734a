"""Which layers go to which stage: in order, cut so that all stages take as nearly the same time as they can."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import ArrayLike

from infinipipe.cost.features import chunk_features
from infinipipe.cost.flops import flop_cost
from infinipipe.cost.shape import CostError, ModelShape, even_stages
from infinipipe.plan import Chunk, Slice

Split = tuple[tuple[int, ...], tuple[int, ...]]
"""Operations of stages, the slowest first, and their layers in order."""


def balanced_stages(shape: ModelShape, num_stages: int, context: int) -> tuple[int, ...]:
    """Layers of every stage, at least one, such that the slowest stage takes the least time.

    Time is that of forward and backward of a sequence of ``context`` tokens by the formula of :func:`flop_cost`: layers with
    a window take less, and the last stage has the head as well. Of splits with equally slow slowest stages,
    that whose second slowest takes the least time is chosen, and so on; of those that then are equal, one with fewer layers on
    the last stage, then on the first, and then on others that come early, since these hold more chunks at once.

    Raises ``CostError`` if there are fewer layers than stages, or nothing to measure them by.
    """
    if context < 1:
        raise CostError(f"the context is {context}; it must be at least 1 token")
    even = even_stages(shape.layers, num_stages)
    layers, first, last = _operations(shape, context)
    before = list(itertools.accumulate(layers, initial=0))

    def operations(stage: int, start: int, stop: int) -> int:
        ends = first * (stage == 0) + last * (stage == num_stages - 1)
        return before[stop] - before[start] + ends

    def order(split: Split) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        times, counts = split
        return times, counts[-1] if len(counts) == num_stages else 0, counts

    stops = itertools.accumulate(even)
    limit = max(operations(stage, stop - even[stage], stop) for stage, stop in enumerate(stops))
    best: dict[int, Split] = {0: ((), ())}
    for stage in range(num_stages):
        longer: dict[int, Split] = {}
        for stop in range(stage + 1, shape.layers - num_stages + stage + 2):
            found: list[Split] = []
            for start in range(stop - 1, stage - 1, -1):
                own = operations(stage, start, stop)
                if own > limit:
                    break
                if start in best:
                    times, counts = best[start]
                    found.append((tuple(sorted((*times, own), reverse=True)), (*counts, stop - start)))
            if found:
                longer[stop] = min(found, key=order)
        best = longer
    return best[shape.layers][1]


def typical_length(lengths: ArrayLike) -> int:
    """The mean of ``lengths`` over their tokens: sequences that long attend, without windows, to as much a token as these."""
    tokens = np.asarray(lengths, np.float64)
    return max(1, round(float(np.square(tokens).sum() / tokens.sum())))


def _operations(shape: ModelShape, context: int) -> tuple[list[int], int, int]:
    """Operations of every layer, and beside the layers on the first and on the last stage, for such a sequence."""
    cost = flop_cost(shape, (shape.layers,), flops_per_second=1.0)
    chunk, passes = Chunk((Slice(0, 0, context, context),)), (cost.forward, cost.backward)
    by_window = {
        window: round(sum(cost.layers_seconds(each, chunk_features(chunk, window), 1.0) for each in passes))
        for window in cost.window_counts
    }
    passes_of_work = 2 * 3 * context  # a forward and a backward of twice that
    beyond = [round(passes_of_work * (shape.work_of(layer) - shape.mean_work)) for layer in range(shape.layers)]
    layers = [by_window[window] + own for window, own in zip(cost.layer_windows[0], beyond, strict=True)]
    first = round(context * sum(each.embedding_token for each in passes))
    last = round(context * sum(each.head_token for each in passes))
    return layers, first, last
