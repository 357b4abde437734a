"""Global batches: shuffled, of a number of sequences and perhaps a token budget, and resumable from a few numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from infinipipe.data.documents import DataError
from infinipipe.data.keys import Keys, distinct, mixed
from infinipipe.data.sequences import Sample, Sequences
from infinipipe.data.settings import DataSettings

SKETCH = 128
"""How many of the smallest keys of a corpus tell two corpora apart."""
LEAST_COMMON = 0.5
"""Share of common sequences below which a saved position belongs to another corpus."""


class _Order:
    """The sequences of one source, epoch after epoch.

    Each epoch has an order of its own: that of a hash of each sequence's key. So the order of the others stays when some are taken out.
    """

    def __init__(self, indices: NDArray[np.int64], keys: Keys, seed: int) -> None:
        self._indices, self._keys, self._seed = indices, keys, seed
        self.epoch = self.position = 0
        self._shuffle()

    @property
    def index(self) -> int:
        """The next sequence."""
        return int(self._shuffled[self.position])

    def advance(self) -> None:
        """Go on to the one after."""
        self.position += 1
        if self.position == len(self._shuffled):
            self.epoch, self.position = self.epoch + 1, 0
            self._shuffle()

    def state(self) -> dict[str, Any]:
        last = int(self._ordered[self.position - 1]) if self.position else None
        return {"epoch": self.epoch, "position": self.position, "last": last}

    def load(self, state: dict[str, Any], *, is_same: bool) -> None:
        """Go on where ``state`` was taken; in a corpus that is not the same, behind the last sequence by its key."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._shuffle()
        if not is_same and state["last"] is not None:
            self.position = int(np.searchsorted(self._ordered, np.uint64(state["last"]), side="right"))
        if self.position >= len(self._shuffled):
            self.epoch, self.position = self.epoch + 1, 0
            self._shuffle()

    def _shuffle(self) -> None:
        keys = mixed(self._keys, self._seed, self.epoch)
        order = np.argsort(keys, kind="stable")
        self._shuffled, self._ordered = self._indices[order], keys[order]


class BatchSampler:
    """Chooses the sequences of every global batch.

    Every epoch visits all sequences once, in an order that depends on ``seed``, the epoch and the sequences' keys only. A batch that
    reaches the end of an epoch goes on into the next one. With ``weights``, every source has epochs of its own, and the next sequence is one of
    that source which has given the fewest tokens for its weight.

    Args:
        lengths: tokens of every sequence.
        sequences_per_step: sequences of a batch.
        tokens_per_step: if above 0, a batch ends before a sequence that would exceed it, but has one at least.
        seed: of the order.
        keys: a hash of each sequence; its index if not given.
        sources: the source of each sequence, counted from 0.
        weights: of the sources in the tokens drawn.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        *,
        sequences_per_step: int,
        tokens_per_step: int = 0,
        seed: int = 0,
        keys: Keys | None = None,
        sources: NDArray[np.integer] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        if not len(lengths):
            raise DataError("there are no sequences to make batches of")
        self._lengths = lengths
        self._sequences_per_step = sequences_per_step
        self._tokens_per_step = tokens_per_step
        keys = distinct(mixed(np.arange(len(lengths), dtype=np.uint64)) if keys is None else keys)
        parts = [np.arange(len(lengths))]
        if weights is not None:
            assert sources is not None, "weights are those of sources"
            parts = [np.flatnonzero(sources == source) for source in range(len(weights))]
        self._weights = [1.0] if weights is None else list(weights)
        self._orders = [_Order(part, keys[part], seed) for part in parts]
        self._drawn = [0] * len(parts)
        self._identity = _identity(lengths, keys, (sequences_per_step, tokens_per_step, seed, weights))

    @property
    def epoch(self) -> int:
        """The epoch that the next batch starts in, from 0; that of the source which has seen the fewest."""
        return min(order.epoch for order in self._orders)

    def next(self) -> list[int]:
        """Indices of the sequences of the next batch."""
        batch: list[int] = []
        tokens = 0
        while len(batch) < self._sequences_per_step:
            source = min(range(len(self._orders)), key=lambda s: self._drawn[s] / self._weights[s])
            index = self._orders[source].index
            length = int(self._lengths[index])
            tokens += length
            if batch and 0 < self._tokens_per_step < tokens:
                break
            batch.append(index)
            self._drawn[source] += length
            self._orders[source].advance()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands. Takes the same short time however large the corpus is."""
        return {
            "orders": [order.state() for order in self._orders],
            "drawn": list(self._drawn),
            "corpus": self._identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Go on where ``state`` was taken; returns lines for the log.

        If some sequences have been taken out, added or changed since, the others keep their order, and what was drawn of them in this
        epoch is not drawn again. Raises ``DataError`` if the state belongs to another seed or batch size, or mostly to others.
        """
        saved, own = state.get("corpus"), self._identity
        if (
            not isinstance(saved, dict)
            or saved.get("settings") != own["settings"]
            or len(state["orders"]) != len(self._orders)
        ):
            raise _other_corpus()
        is_same = saved["exact"] == own["exact"]
        common = 1.0 if is_same else _common(saved["sketch"], own["sketch"])
        if common < LEAST_COMMON:
            raise _other_corpus()
        for order, position in zip(self._orders, state["orders"], strict=True):
            order.load(position, is_same=is_same)
        self._drawn = [int(drawn) for drawn in state["drawn"]]
        if is_same:
            return []
        return [
            f"the corpus has changed since: {common:.1%} of the sequences then and now are the same; these go on in the order that "
            "they had"
        ]


def _other_corpus() -> DataError:
    return DataError(
        "the saved position belongs to another corpus, seed or batch size; restore the data settings of that run"
    )


def _identity(lengths: NDArray[np.int64], keys: Keys, settings: object) -> dict[str, Any]:
    """What a saved position says of the corpus: a hash of everything, one of the settings, and the smallest keys."""
    content = keys.tobytes() + lengths.astype(np.int64).tobytes()
    smallest = np.sort(np.partition(keys, SKETCH - 1)[:SKETCH] if len(keys) > SKETCH else keys)
    return {
        "exact": hashlib.blake2b(content, digest_size=8).hexdigest(),
        "settings": hashlib.blake2b(repr(settings).encode(), digest_size=8).hexdigest(),
        "sketch": smallest.tolist(),
    }


def _common(sketch: list[int], other: list[int]) -> float:
    """Share of two sets in their union, estimated by the smallest members of each."""
    smallest = sorted({*sketch, *other})[:SKETCH]
    return len({*smallest} & {*sketch} & {*other}) / max(1, len(smallest))


class Batches(Protocol):
    """The global batches of a run, without end."""

    def next(self) -> list[Sample]:
        """The sequences of the next batch. Raises ``DataError``."""

    def state_dict(self) -> dict[str, Any]:
        """Where they stand behind the last one that was taken."""

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Go on where ``state`` was taken; returns lines for the log. Raises ``DataError`` if it is of another corpus."""

    def close(self) -> None:
        """End what works for them."""


class SampledBatches:
    """Global batches of sequences that are all known."""

    def __init__(self, sequences: Sequences, settings: DataSettings, seed: int) -> None:
        self._sequences = sequences
        self._sampler = BatchSampler(
            sequences.lengths,
            sequences_per_step=settings.sequences_per_step,
            tokens_per_step=settings.tokens_per_step,
            seed=seed,
            keys=sequences.keys,
            sources=sequences.sources,
            weights=sequences.weights_of_sources,
        )

    def next(self) -> list[Sample]:
        return [self._sequences.sample(index) for index in self._sampler.next()]

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        return self._sampler.load_state_dict(state)

    def close(self) -> None:
        pass
