"""What planners and the simulator ask of a cost model: seconds and bytes, per device."""

from __future__ import annotations

from typing import Protocol

from infinipipe.plan import Chunk


class CostModel(Protocol):
    """Time and memory of chunks at stages (section III-A).

    ``stage`` counts from 0. Times are in seconds and hold for all devices of a stage together; bytes are for one device.
    """

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Decoder layers of every stage."""
        ...

    def forward_seconds(self, chunk: Chunk, stage: int) -> float:
        """Forward of the chunk at the stage, sequence-parallel communication included (Eq. 1, 4)."""
        ...

    def backward_seconds(self, chunk: Chunk, stage: int) -> float:
        """Backward of the chunk at the stage without any recompute."""
        ...

    def recompute_seconds(self, chunk: Chunk, stage: int, layers: int) -> float:
        """What recomputing the stage's first ``layers`` layers adds to the chunk's backward (Eq. 11)."""
        ...

    def message_seconds(self, num_tokens: int) -> float:
        """Transfer of the hidden states, or their gradients, of ``num_tokens`` tokens to a neighbouring stage."""
        ...

    def activation_bytes(self, chunk: Chunk, stage: int, layers: int) -> int:
        """Held from the chunk's forward to the end of its backward with ``layers`` recomputed layers (Eq. 5, 9, 10).

        Keys and values of a cut sequence are not in it: they lie in the store, see :meth:`kv_bytes`.
        """
        ...

    def kv_bytes(self, length: int, stage: int) -> int:
        """The key/value store of a cut sequence of ``length`` tokens.

        Held from the forward of its first slice to the end of that slice's backward.
        """
        ...

    def dkv_bytes(self, length: int, stage: int) -> int:
        """The gradients of that store, held from the start of the last slice's backward to the end of the first's."""
        ...

    def forward_transient_bytes(self, chunk: Chunk, stage: int, layers: int) -> int:
        """The most that the chunk's forward needs, while it runs, beyond what it leaves behind."""
        ...

    def backward_transient_bytes(self, chunk: Chunk, stage: int, layers: int) -> int:
        """The most that the chunk's backward needs, while it runs, beyond what is held when it starts."""
        ...

    def message_bytes(self, num_tokens: int) -> int:
        """One buffer of a message of ``num_tokens`` tokens."""
        ...

    def state_bytes(self, stage: int) -> int:
        """Parameters, gradients and optimizer states of the stage."""
        ...
