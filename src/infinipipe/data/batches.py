"""Global batches: shuffled, of a number of sequences and perhaps a token budget, and resumable from a few numbers."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinipipe.data.documents import DataError


class BatchSampler:
    """Chooses the sequences of every global batch.

    Every epoch visits all sequences once, in an order that depends on ``seed`` and the epoch only. A batch that reaches the
    end of an epoch goes on into the next one.

    Args:
        lengths: tokens of every sequence.
        sequences_per_step: sequences of a batch.
        tokens_per_step: if above 0, a batch ends before a sequence that would exceed it, but has one at least.
        seed: of the order.
    """

    def __init__(
        self, lengths: NDArray[np.int64], *, sequences_per_step: int, tokens_per_step: int = 0, seed: int = 0
    ) -> None:
        if not len(lengths):
            raise DataError("there are no sequences to make batches of")
        self._lengths = lengths
        self._sequences_per_step = sequences_per_step
        self._tokens_per_step = tokens_per_step
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled(0)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch starts in, from 0."""
        return self._epoch

    def next(self) -> list[int]:
        """Indices of the sequences of the next batch."""
        batch: list[int] = []
        tokens = 0
        while len(batch) < self._sequences_per_step:
            index = int(self._order[self._position])
            tokens += int(self._lengths[index])
            if batch and 0 < self._tokens_per_step < tokens:
                break
            batch.append(index)
            self._position += 1
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled(self._epoch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands."""
        return {"epoch": self._epoch, "position": self._position, "corpus": self._corpus()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises ``DataError`` if it belongs to other sequences, seed or batch sizes."""
        if state["corpus"] != self._corpus():
            raise DataError(
                "the saved position belongs to another corpus, seed or batch size; restore the data settings of that run"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._lengths))

    def _corpus(self) -> str:
        settings = (self._sequences_per_step, self._tokens_per_step, self._seed)
        return hashlib.sha256(repr(settings).encode() + self._lengths.astype(np.int64).tobytes()).hexdigest()[:16]
