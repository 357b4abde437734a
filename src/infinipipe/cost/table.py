"""The cost of many chunks at every stage, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from infinipipe.cost.interface import CostModel
from infinipipe.cost.work import FloatArray
from infinipipe.plan import Chunk


@dataclass(frozen=True)
class CostTable:
    """Arrays of shape (stages, chunks), in seconds and bytes, except ``message``: (chunks,) seconds of one transfer.

    With ``l`` recomputed layers of a chunk, the backward takes ``l * layer_recompute`` longer, ``l * layer_saving`` bytes less
    are held, and the transients are the ``_full`` ones if ``l`` is all of the stage's layers; the others hold for any smaller ``l``.
    """

    stage_layers: tuple[int, ...]
    forward: FloatArray
    backward: FloatArray
    layer_recompute: FloatArray
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

    return CostTable(
        stage_layers=layers,
        forward=rows(cost.forward_seconds),
        backward=rows(cost.backward_seconds),
        layer_recompute=rows(lambda chunk, stage: cost.recompute_seconds(chunk, stage, 1)),
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
