"""The data of one global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infinipipe.model import IGNORE
from infinipipe.plan import Chunk


@dataclass(frozen=True)
class Batch:
    """Tokens and labels of every sequence of a global batch.

    Attributes:
        tokens: per sequence (length,) int64.
        labels: per sequence (length,) int64, shifted already: the label of a token is the next one, ``IGNORE`` where there
            is no next one or it is not supervised.
        weights: per sequence (length,) float32: what the loss of each label counts, above 0 where there is one; if there are none,
            each counts once.
        num_supervised: labels other than ``IGNORE`` in the whole global batch.
        total_weight: what these count together: the mean loss is the weighted sum of the token losses over it.
    """

    tokens: Sequence[Tensor]
    labels: Sequence[Tensor]
    weights: Sequence[Tensor] | None = None
    num_supervised: int = field(init=False)
    total_weight: float = field(init=False)

    def __post_init__(self) -> None:
        count = sum(int((labels != IGNORE).sum()) for labels in self.labels)
        object.__setattr__(self, "num_supervised", count)
        total = float(count)
        if self.weights is not None:
            pairs = zip(self.weights, self.labels, strict=True)
            total = sum(float(weights[labels != IGNORE].sum(dtype=torch.float64)) for weights, labels in pairs)
        object.__setattr__(self, "total_weight", total)

    @classmethod
    def from_tokens(cls, tokens: Sequence[Tensor], supervised: Sequence[Tensor] | None = None) -> Batch:
        """Shift ``tokens`` into labels; ``supervised``, if given, says per token whether it counts as a target."""
        labels = []
        for i, sequence in enumerate(tokens):
            shifted = torch.full_like(sequence, IGNORE)
            shifted[:-1] = sequence[1:]
            if supervised is not None:
                shifted[:-1][~supervised[i][1:]] = IGNORE
            labels.append(shifted)
        return cls(tokens, labels)

    def chunk_tokens(self, chunk: Chunk) -> Tensor:
        """Tokens of a chunk, (tokens,) int64."""
        return torch.cat([self.tokens[piece.sequence][piece.start : piece.stop] for piece in chunk.slices])

    def chunk_labels(self, chunk: Chunk) -> Tensor:
        """Labels of a chunk, (tokens,) int64."""
        return torch.cat([self.labels[piece.sequence][piece.start : piece.stop] for piece in chunk.slices])

    def chunk_weights(self, chunk: Chunk) -> Tensor | None:
        """What the loss of a chunk's labels counts, (tokens,) float32; ``None`` if each counts once."""
        if self.weights is None:
            return None
        return torch.cat([self.weights[piece.sequence][piece.start : piece.stop] for piece in chunk.slices])
