"""Training sequences: documents, or parts of them, that are at most as long as the settings allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infinipipe.data.cache import TokenCache
from infinipipe.data.documents import DataError
from infinipipe.data.keys import distinct, mixed
from infinipipe.data.settings import DataSettings

IGNORED = -100


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that are sequences of their own.

    Attributes:
        documents: the document of each.
        starts: its first token there.
        lengths: its tokens.
    """

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def chosen(self, which: NDArray[np.bool_]) -> Pieces:
        return Pieces(self.documents[which], self.starts[which], self.lengths[which])


@dataclass(frozen=True)
class Sequences:
    """Some documents, or parts of them, of one or several sources as training sequences.

    Attributes:
        caches: the tokens of every source.
        names: of the sources.
        weights_of_sources: shares of the sources in the tokens of training, relative to each other; ``None`` if they are one corpus.
        sources: the source of each sequence.
        documents: its document there.
        starts: its first token in that.
        lengths: its tokens.
        keys: a hash of each, which hardly any two share.
    """

    caches: tuple[TokenCache, ...]
    names: tuple[str, ...]
    weights_of_sources: tuple[float, ...] | None
    sources: NDArray[np.int16]
    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    keys: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.documents)

    def chosen(self, which: NDArray[np.bool_]) -> Sequences:
        """Some of them."""
        return dataclasses.replace(
            self,
            sources=self.sources[which],
            documents=self.documents[which],
            starts=self.starts[which],
            lengths=self.lengths[which],
            keys=self.keys[which],
        )

    def tokens(self, index: int) -> NDArray[np.int64]:
        """The tokens of one sequence, shape (length,)."""
        cache, document = self._place(index)
        start = (int(cache.ends[document - 1]) if document > 0 else 0) + int(self.starts[index])
        return cache.tokens[start : start + int(self.lengths[index])].astype(np.int64)

    def labels(self, index: int) -> NDArray[np.int64]:
        """What each token is to predict, shape (length,): the next token, or -100 where nothing is learnt.

        Nothing is learnt from the last token and from those whose next one is in none of the document's learnt spans.
        """
        tokens = self.tokens(index)
        labels = np.full(len(tokens), IGNORED, dtype=np.int64)
        for start, stop in self._learnt(index):
            labels[start:stop] = tokens[start + 1 : stop + 1]
        return labels

    def weights(self, index: int) -> NDArray[np.float32]:
        """What each label weighs in the loss, shape (length,): the document's weight, or 0 where nothing is learnt."""
        cache, document = self._place(index)
        weights = np.zeros(int(self.lengths[index]), dtype=np.float32)
        for start, stop in self._learnt(index):
            weights[start:stop] = cache.weights[document]
        return weights

    def weight(self, index: int) -> float:
        """What the document of a sequence weighs in the loss."""
        cache, document = self._place(index)
        return float(cache.weights[document])

    def _learnt(self, index: int) -> Iterator[tuple[int, int]]:
        """Where the labels stand that are learnt."""
        cache, document = self._place(index)
        start, length = int(self.starts[index]), int(self.lengths[index])
        for first, last in (cache.learnt(document) - start).tolist():
            if max(first, 1) < min(last, length):
                yield max(first, 1) - 1, min(last, length) - 1

    def name(self, index: int) -> str:
        """Where a sequence comes from: file, number of the document, and for a part of one its tokens."""
        cache, document = self._place(index)
        start, length = int(self.starts[index]), int(self.lengths[index])
        is_part = start > 0 or start + length < int(cache.lengths[document])
        return cache.name(document) + (f" (tokens {start} to {start + length})" if is_part else "")

    def source(self, index: int) -> str:
        """Name of the source of a sequence."""
        return self.names[self.sources[index]]

    def are_below(self, share: float, *, one_at_least: bool) -> NDArray[np.bool_]:
        """Which are of documents whose hash is below a ``share`` of the largest; the lowest one in any case if ``one_at_least``.

        Parts of one document, and documents that say the same, fall on one side, on every machine and whatever else is there.
        """
        keys = np.zeros(len(self), dtype=np.uint64)
        for source, cache in enumerate(self.caches):
            own = self.sources == source
            keys[own] = cache.keys[self.documents[own]]
        if share == 0 or not len(keys):
            return np.zeros(len(keys), dtype=bool)
        border = max(int(share * 2**64), int(keys.min()) + 1 if one_at_least else 0)
        return keys < np.uint64(min(border, 2**64 - 1))

    def tokens_of_sources(self) -> dict[str, int]:
        """Tokens of all sequences of each source."""
        counts = np.zeros(len(self.names), dtype=np.int64)
        np.add.at(counts, self.sources, self.lengths)
        return dict(zip(self.names, counts.tolist(), strict=True))

    def sample(self, index: int) -> Sample:
        """One of them."""
        return Sample(self, index)

    def with_ids_from(self, first: int) -> Iterator[Sample]:
        """Those of sources that have an id of ``first`` or above somewhere."""
        reaching = [source for source, cache in enumerate(self.caches) if cache.largest_id >= first]
        for index in np.flatnonzero(np.isin(self.sources, reaching)):
            yield Sample(self, int(index))

    def _place(self, index: int) -> tuple[TokenCache, int]:
        return self.caches[self.sources[index]], int(self.documents[index])


@dataclass(frozen=True)
class Sample:
    """One training sequence of a batch."""

    sequences: Sequences
    index: int

    @property
    def length(self) -> int:
        return int(self.sequences.lengths[self.index])

    @property
    def tokens(self) -> NDArray[np.int64]:
        """See :meth:`Sequences.tokens`, and so for the others."""
        return self.sequences.tokens(self.index)

    @property
    def labels(self) -> NDArray[np.int64]:
        return self.sequences.labels(self.index)

    @property
    def weights(self) -> NDArray[np.float32]:
        return self.sequences.weights(self.index)

    @property
    def weight(self) -> float:
        """That of its document in the loss."""
        return self.sequences.weight(self.index)

    @property
    def name(self) -> str:
        return self.sequences.name(self.index)

    @property
    def source(self) -> str:
        return self.sequences.source(self.index)


def tokens_by_source(samples: Sequence[Sample]) -> dict[str, int]:
    """Tokens that each source gives to a batch."""
    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.source] = counts.get(sample.source, 0) + sample.length
    return counts


def sequences_of(
    caches: Sequence[TokenCache],
    parts: Sequence[Pieces],
    names: Sequence[str],
    weights: tuple[float, ...] | None = None,
) -> Sequences:
    """The sequences that pieces of each source's documents make."""
    keys = []
    for cache, pieces in zip(caches, parts, strict=True):
        own = cache.keys[pieces.documents]
        is_later = pieces.starts > 0
        own[is_later] = mixed(own[is_later] + pieces.starts[is_later].astype(np.uint64))
        keys.append(own)
    return Sequences(
        caches=tuple(caches),
        names=tuple(names),
        weights_of_sources=weights,
        sources=np.repeat(np.arange(len(parts), dtype=np.int16), [len(pieces.documents) for pieces in parts]),
        documents=np.concatenate([pieces.documents for pieces in parts]),
        starts=np.concatenate([pieces.starts for pieces in parts]),
        lengths=np.concatenate([pieces.lengths for pieces in parts]),
        keys=distinct(np.concatenate(keys)),
    )


def fit_length(cache: TokenCache, settings: DataSettings) -> tuple[Pieces, list[str]]:
    """The sequences that documents make by the policy for those too long, and what it did.

    Parts of a split document share a token with the next, so that every token is learnt once. Raises ``DataError`` where too long is an error.
    """
    lengths, most = cache.lengths, settings.max_length
    too_long = lengths > most
    documents, starts = np.arange(len(lengths)), np.zeros(len(lengths), dtype=np.int64)
    whole = Pieces(documents, starts, lengths)
    if not too_long.any():
        return whole, []
    share = too_long.sum() / len(lengths)
    line = f"{too_long.sum()} documents ({share:.1%}) above {most} tokens, "
    if settings.on_too_long == "error":
        first = int(np.argmax(too_long))
        raise DataError(
            f"{cache.name(first)} has {lengths[first]} tokens, data.max_length is {most} ({too_long.sum()} "
            "such documents in all); raise it, or set data.on_too_long to drop, truncate or split"
        )
    if settings.on_too_long == "drop":
        return whole.chosen(~too_long), [line + "dropped"]
    if settings.on_too_long == "truncate":
        pieces = Pieces(documents, starts, np.minimum(lengths, most))
        line += "truncated"
        lost = "lost all that is to be learnt"
    else:
        pieces = _split_up(lengths, most)
        line += f"split into {len(pieces.documents) - (~too_long).sum()} sequences"
        lost = "hold nothing to learn"
    empty = too_long[pieces.documents] & ~_learns(cache, pieces)
    if empty.any():
        line += f"; {empty.sum()} of them {lost}, dropped"
    return pieces.chosen(~empty), [line]


def _split_up(lengths: NDArray[np.int64], most: int) -> Pieces:
    counts = np.maximum(1, -(-(lengths - 1) // (most - 1)))
    documents = np.repeat(np.arange(len(lengths)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(documents)) - first) * (most - 1)
    return Pieces(documents, starts, np.minimum(most, lengths[documents] - starts))


def _learns(cache: TokenCache, pieces: Pieces) -> NDArray[np.bool_]:
    """Which pieces hold a token to be learnt behind their first one."""
    begins = cache.ends - cache.lengths
    owners = np.searchsorted(cache.span_ends, np.arange(len(cache.spans)), side="right")
    spans = cache.spans + begins[owners][:, None]
    first = begins[pieces.documents] + pieces.starts
    reaching = np.searchsorted(spans[:, 1], first + 1, side="right")
    begin_of_span = np.append(spans[:, 0], np.iinfo(np.int64).max)
    return begin_of_span[reaching] < first + pieces.lengths
