"""What planners and the simulator ask of a cost model: seconds and bytes, per device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from infinipipe.cost.table import CostTable
from infinipipe.plan import Chunk, Placement


class CostModel(Protocol):
    """Time and memory of chunks at parts of the model (section III-A).

    ``part`` and ``stage`` count from 0. Times are in seconds and hold for all devices of a stage together; bytes are for one device.
    """

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Decoder layers of every part."""
        ...

    @property
    def placement(self) -> Placement:
        """The parts of every stage."""
        ...

    def pass_seconds(self, column: str, chunk: Chunk, part: int) -> float:
        """What an action takes for the chunk at the part without any recompute (Eq. 1, 4).

        ``column`` is one of ``infinipipe.plan.COLUMNS``: ``forward``, ``backward``, and its halves ``backward_input`` and
        ``backward_weight``. Sequence-parallel communication is included.
        """
        ...

    def recompute_seconds(self, chunk: Chunk, part: int, layers: int) -> float:
        """What computing the part's first ``layers`` layers again adds to the chunk's backward (Eq. 11)."""
        ...

    def message_seconds(self, num_tokens: int) -> float:
        """Transfer of the hidden states, or their gradients, of ``num_tokens`` tokens to another stage."""
        ...

    def activation_bytes(self, chunk: Chunk, part: int, layers: int) -> int:
        """Held from the chunk's forward to the end of its backward with ``layers`` recomputed layers (Eq. 5, 9, 10).

        Keys and values of a cut sequence are not in it: they lie in the store, see :meth:`kv_bytes`.
        """
        ...

    def kv_bytes(self, length: int, part: int) -> int:
        """The key/value store of a cut sequence of ``length`` tokens.

        Held from the forward of its first slice to the end of that slice's backward.
        """
        ...

    def dkv_bytes(self, length: int, part: int) -> int:
        """The gradients of that store, held from the start of the last slice's backward to the end of the first's."""
        ...

    def weight_operand_bytes(self, chunk: Chunk, part: int) -> int:
        """What the second half of a backward needs of the first: inputs and output gradients of the linear layers."""
        ...

    def transient_bytes(self, column: str, chunk: Chunk, part: int, layers: int) -> int:
        """The most that an action needs while it runs, beyond what is held then; ``layers`` layers are recomputed.

        A forward's output, which it leaves behind, is included; what a backward gives up while it runs counts as held.
        """
        ...

    def message_bytes(self, num_tokens: int) -> int:
        """One buffer of a message of ``num_tokens`` tokens."""
        ...

    def state_bytes(self, stage: int) -> int:
        """Parameters, gradients and optimizer states of all parts of the stage."""
        ...

    def table(self, chunks: Sequence[Chunk]) -> CostTable:
        """The same figures for many chunks at once; :func:`infinipipe.cost.table_by_chunk` makes them from the other methods."""
        ...

    @property
    def pair_seconds(self) -> Mapping[int, float]:
        """Forward and backward over all parts of the layers with each window (0 for none), per unit of ``pairs`` of whole sequences.

        By it, sequences are cut into slices of equal time; if it is empty, all layers count as without a window.
        """
        ...
