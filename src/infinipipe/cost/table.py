"""The cost of many chunks at every part, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from infinipipe.cost.features import FloatArray
from infinipipe.plan import COLUMNS, KINDS, Chunk, Placement
from infinipipe.plan.kinds import ACTIVATIONS, KEYS_VALUES, KV_GRADIENTS, WEIGHT_OPERANDS

if TYPE_CHECKING:
    from infinipipe.cost.interface import CostModel

PILING_UP = frozenset(row.cost for row in KINDS.values() if row.leaves_behind)
"""Columns of actions behind which something piles up while they run."""

Column = TypeVar("Column")


class Columns(dict[str, Column]):
    """Columns of a cost table, each made when it is first asked for: few plans have actions of all kinds."""

    def __init__(self, make: Callable[[str], Column]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Column:
        if name not in COLUMNS:
            raise KeyError(name)
        self[name] = self._make(name)
        return self[name]


@dataclass(frozen=True)
class CostTable:
    """Arrays of shape (parts, chunks), in seconds and bytes, except ``message``: (chunks,) seconds of one transfer, and
    ``recompute``: (parts, most layers + 1, chunks).

    With the first ``l`` layers recomputed for a chunk, its backward takes ``recompute[:, l]`` longer, and ``l * layer_saving`` bytes
    less are held.

    Attributes:
        stage_layers, placement: of the cost model.
        seconds: of every column of ``COLUMNS``, without recompute.
        held: bytes of every resource by its name, activations without recompute; of a sequence's, at the chunk that acquires it.
        transient: of every column, what its action needs while it runs, with a kept layer and without one; see
            :meth:`transient_at`.
        message_bytes: (chunks,) of one buffer.
    """

    stage_layers: tuple[int, ...]
    placement: Placement
    seconds: Columns[FloatArray]
    recompute: FloatArray
    message: FloatArray
    held: Mapping[str, FloatArray]
    layer_saving: FloatArray
    transient: Columns[tuple[FloatArray, FloatArray]]
    message_bytes: FloatArray

    @property
    def num_parts(self) -> int:
        return len(self.stage_layers)

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_chunks(self) -> int:
        return int(self.message.shape[0])

    @property
    def forward_backward(self) -> FloatArray:
        """(parts, chunks) seconds of a forward and a backward."""
        return self.seconds["forward"] + self.seconds["backward"]

    @property
    def layer_recompute(self) -> FloatArray:
        """(parts, chunks) seconds of recomputing one layer, the mean over the part's."""
        layers = np.array(self.stage_layers)[:, None]
        return self.recompute_seconds(np.broadcast_to(layers, (self.num_parts, self.num_chunks))) / np.maximum(
            layers, 1
        )

    def recompute_seconds(self, layers: ArrayLike) -> FloatArray:
        """(parts, chunks) seconds that recomputing the first ``layers``, as many for every part and chunk, adds."""
        first = np.array(layers, np.int64).reshape(self.num_parts, self.num_chunks)
        return np.take_along_axis(self.recompute, first[:, None], axis=1)[:, 0]

    def held_at(self, recompute: ArrayLike) -> dict[str, FloatArray]:
        """(parts, chunks) bytes of every resource by its name, with so many layers recomputed."""
        dropped = np.array(recompute, np.int64).reshape(self.layer_saving.shape)
        return {**self.held, ACTIVATIONS.name: self.held[ACTIVATIONS.name] - dropped * self.layer_saving}

    def transient_at(self, column: str, recompute: ArrayLike) -> FloatArray:
        """(parts, chunks) bytes that actions of a column need while they run, with so many layers recomputed.

        Without a kept layer they need the second of the transients, else the first. Where something piles up, it does so from one
        recomputed layer on: then the peak is where it is without a kept layer, however much of the rest is held before.
        """
        kept, full = self.transient[column]
        dropped = np.array(recompute, np.int64).reshape(kept.shape)
        left = np.array(self.stage_layers)[:, None] - dropped
        if column in PILING_UP:
            piled = np.maximum(kept, full - left * self.layer_saving)
            kept = np.where(dropped > 0, piled, kept)
        return np.where(left <= 0, full, kept)


def table_by_chunk(cost: CostModel, chunks: Sequence[Chunk]) -> CostTable:
    """The cost of ``chunks`` at every part, by the methods for one chunk."""
    layers = cost.stage_layers

    def rows(function: Callable[[Chunk, int], float]) -> FloatArray:
        table = [[function(chunk, part) for chunk in chunks] for part in range(len(layers))]
        return np.array(table, np.float64).reshape(len(layers), len(chunks))

    def saving(chunk: Chunk, part: int) -> float:
        kept, dropped = (cost.activation_bytes(chunk, part, recomputed) for recomputed in (0, layers[part]))
        return (kept - dropped) / max(layers[part], 1)

    def transient(column: str) -> tuple[FloatArray, FloatArray]:
        # What holds for any number of kept layers must hold for one, of which the gradient of the embedding needs the most. An
        # action that leaves something behind has the full transient from one recomputed layer on, and this one for none.
        most = [0 if column in PILING_UP else max(0, count - 1) for count in layers]
        return (
            rows(lambda chunk, part: cost.transient_bytes(column, chunk, part, most[part])),
            rows(lambda chunk, part: cost.transient_bytes(column, chunk, part, layers[part])),
        )

    recompute = np.zeros((len(layers), max(layers) + 1, len(chunks)))
    for part, count in enumerate(layers):
        for first in range(1, count + 1):
            recompute[part, first] = [cost.recompute_seconds(chunk, part, first) for chunk in chunks]

    return CostTable(
        stage_layers=layers,
        placement=cost.placement,
        seconds=Columns(lambda column: rows(lambda chunk, part: cost.pass_seconds(column, chunk, part))),
        recompute=recompute,
        message=np.array([cost.message_seconds(chunk.num_tokens) for chunk in chunks], np.float64),
        held={
            ACTIVATIONS.name: rows(lambda chunk, part: cost.activation_bytes(chunk, part, 0)),
            WEIGHT_OPERANDS.name: rows(cost.weight_operand_bytes),
            **sequence_bytes(cost, chunks),
        },
        layer_saving=rows(saving),
        transient=Columns(transient),
        message_bytes=message_bytes(cost, chunks),
    )


def sequence_bytes(cost: CostModel, chunks: Sequence[Chunk]) -> dict[str, FloatArray]:
    """What cut sequences hold, at the chunks of the slices that acquire it, and 0 at all others."""
    parts = range(len(cost.stage_layers))
    stores, gradients = np.zeros((2, len(parts), len(chunks)))
    for index, chunk in enumerate(chunks):
        piece = chunk.slices[0]
        if piece.is_whole:
            continue
        if piece.start == 0:
            stores[:, index] = [cost.kv_bytes(piece.length, part) for part in parts]
        elif piece.is_tail:
            gradients[:, index] = [cost.dkv_bytes(piece.start, part) for part in parts]
    return {KEYS_VALUES.name: stores, KV_GRADIENTS.name: gradients}


def message_bytes(cost: CostModel, chunks: Sequence[Chunk]) -> FloatArray:
    """(chunks,) bytes of one message of each."""
    return np.array([cost.message_bytes(chunk.num_tokens) for chunk in chunks], np.float64)
