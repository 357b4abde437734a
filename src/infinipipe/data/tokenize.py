"""Shards to tokens, on several processes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from infinipipe.data.cache import TokenizedChunk
from infinipipe.data.documents import BadRecordError, DataError, Document, ReadCounts
from infinipipe.data.encode import Encoded, Encoder, EncoderSpec
from infinipipe.data.parse import documents_of, refuse
from infinipipe.data.settings import DataSettings
from infinipipe.data.shards import Chunk, Shard
from infinipipe.data.workers import Workers, available_cpus

BYTES_PER_WORKER = 2**22
"""Below this, starting another process takes longer than it saves."""


@dataclass(frozen=True)
class Task:
    """What to make tokens of, and how."""

    spec: EncoderSpec
    settings: DataSettings


def tokenizing(task: Task) -> Callable[[Chunk], TokenizedChunk]:
    """What makes tokens of a chunk. Raises ``DataError`` where the settings do not tolerate what is there."""
    encoder = Encoder(task.spec)
    return lambda chunk: _tokenized(chunk, encoder, task)


def workers_for(shards: Sequence[Shard], task: Task) -> Workers[Chunk, TokenizedChunk]:
    """The processes that tokenize; none, which is this one, if one is asked for or more are not worth it."""
    chosen = task.settings.workers
    if chosen == 0:
        size = sum(shard.size for shard in shards)
        chosen = min(available_cpus(), size // BYTES_PER_WORKER) if size else available_cpus()
    return Workers(0 if chosen < 2 else chosen, tokenizing, task)


def _tokenized(chunk: Chunk, encoder: Encoder, task: Task) -> TokenizedChunk:
    counts = ReadCounts()
    found = list(documents_of(chunk, task.settings, counts))
    encoded = encoder.encode([document for _, document in found], counts)
    kept = list(_kept(found, encoded, task.settings, counts))
    documents = [document for _, document, _ in kept]
    tokens = np.concatenate([np.zeros(0, dtype=np.int64), *(made.tokens for _, _, made in kept)])
    if len(tokens) and tokens.max() > task.spec.largest:
        wrong = next(document.name for _, document, made in kept if made.tokens.max() > task.spec.largest)
        raise DataError(
            f"{wrong} becomes the token {tokens.max()}, but the largest of the tokenizer is {task.spec.largest}; its files "
            "do not fit together"
        )
    is_own = chunk.first == 0
    return TokenizedChunk(
        tokens=tokens.astype(task.spec.dtype),
        lengths=np.asarray([len(made.tokens) for _, _, made in kept], dtype=np.int64),
        spans=np.concatenate([np.zeros((0, 2), dtype=np.int64), *(made.spans for _, _, made in kept)]),
        span_counts=np.asarray([len(made.spans) for _, _, made in kept], dtype=np.int64),
        weights=np.asarray([document.weight for document in documents], dtype=np.float32),
        keys=np.asarray([document.key for document in documents], dtype=np.uint64),
        shards=np.asarray([chunk.shard + (index if is_own else 0) for index, _, _ in kept], dtype=np.int32),
        numbers=np.asarray([0 if is_own else chunk.first + index for index, _, _ in kept], dtype=np.int64),
        counts=counts,
        shard=chunk.shard,
        skipped=max(0, chunk.first - 1),
        records=chunk.count,
        bytes_done=chunk.bytes_done,
    )


def _kept(
    found: Iterable[tuple[int, Document]],
    encoded: Iterable[Encoded | BadRecordError],
    settings: DataSettings,
    counts: ReadCounts,
) -> Iterator[tuple[int, Document, Encoded]]:
    """The documents that have tokens, and something to learn among them."""
    for (index, document), made in zip(found, encoded, strict=True):
        if isinstance(made, BadRecordError):
            counts.documents -= 1
            refuse(document.name, made, settings, counts)
        elif not len(made.spans):
            counts.documents -= 1
            counts.unlearnt += 1
        else:
            yield index, document, made
