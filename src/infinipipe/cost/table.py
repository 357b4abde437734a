"""The cost of many chunks at every stage, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from infinipipe.cost.interface import CostModel
from infinipipe.cost.work import FloatArray
from infinipipe.plan import Chunk


@dataclass(frozen=True)
class CostTable:
    """Arrays of shape (stages, chunks), in seconds and bytes, except ``message``: (chunks,) seconds of one transfer, and
    ``recompute``: (stages, most layers + 1, chunks).

    With the first ``l`` layers recomputed for a chunk, the backward takes ``recompute[:, l]`` longer, ``l * layer_saving`` bytes
    less are held, and the transients are the ``_full`` ones if ``l`` is all of the stage's layers; the others hold for any
    smaller ``l``.
    """

    stage_layers: tuple[int, ...]
    forward: FloatArray
    backward: FloatArray
    recompute: FloatArray
    message: FloatArray
    activation: FloatArray
    layer_saving: FloatArray
    forward_transient: FloatArray
    forward_transient_full: FloatArray
    backward_transient: FloatArray
    backward_transient_full: FloatArray

    @property
    def num_stages(self) -> int:
        return len(self.stage_layers)

    @property
    def num_chunks(self) -> int:
        return int(self.message.shape[0])

    @property
    def layer_recompute(self) -> FloatArray:
        """(stages, chunks) seconds of recomputing one layer, the mean over the stage's."""
        layers = np.array(self.stage_layers)[:, None]
        return self.recompute_seconds(np.broadcast_to(layers, self.forward.shape)) / np.maximum(layers, 1)

    def recompute_seconds(self, layers: ArrayLike) -> FloatArray:
        """(stages, chunks) seconds that recomputing the first ``layers``, as many for every stage and chunk, adds."""
        first = np.array(layers, np.int64).reshape(self.forward.shape)
        return np.take_along_axis(self.recompute, first[:, None], axis=1)[:, 0]


@runtime_checkable
class HasTable(Protocol):
    """A cost model that fills a whole table faster than chunk by chunk."""

    def table(self, chunks: Sequence[Chunk]) -> CostTable:
        """The cost of ``chunks`` at every stage."""
        ...


def tabulate(cost: CostModel, chunks: Sequence[Chunk]) -> CostTable:
    """The cost of ``chunks`` at every stage of ``cost``."""
    if isinstance(cost, HasTable):
        return cost.table(chunks)
    layers = cost.stage_layers

    def rows(function: Callable[[Chunk, int], float]) -> FloatArray:
        table = [[function(chunk, stage) for chunk in chunks] for stage in range(len(layers))]
        return np.array(table, np.float64).reshape(len(layers), len(chunks))

    def saving(chunk: Chunk, stage: int) -> float:
        kept, dropped = (cost.activation_bytes(chunk, stage, recomputed) for recomputed in (0, layers[stage]))
        return (kept - dropped) / max(layers[stage], 1)

    recompute = np.zeros((len(layers), max(layers) + 1, len(chunks)))
    for stage, count in enumerate(layers):
        for first in range(1, count + 1):
            recompute[stage, first] = [cost.recompute_seconds(chunk, stage, first) for chunk in chunks]

    return CostTable(
        stage_layers=layers,
        forward=rows(cost.forward_seconds),
        backward=rows(cost.backward_seconds),
        recompute=recompute,
        message=np.array([cost.message_seconds(chunk.num_tokens) for chunk in chunks], np.float64),
        activation=rows(lambda chunk, stage: cost.activation_bytes(chunk, stage, 0)),
        layer_saving=rows(saving),
        forward_transient=rows(lambda chunk, stage: cost.forward_transient_bytes(chunk, stage, 0)),
        forward_transient_full=rows(lambda chunk, stage: cost.forward_transient_bytes(chunk, stage, layers[stage])),
        backward_transient=rows(
            lambda chunk, stage: cost.backward_transient_bytes(chunk, stage, max(0, layers[stage] - 1))
        ),
        backward_transient_full=rows(lambda chunk, stage: cost.backward_transient_bytes(chunk, stage, layers[stage])),
    )
