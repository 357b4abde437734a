"""Shards, files or tables, and the chunks of records that they are read in. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

CHUNK_BYTES = 2**18
"""About what is read, and tokenized, at once."""
CHUNK_RECORDS = 1024

Kind = Literal["text", "line", "row", "escaped", "csv", "table", "tokens"]


@dataclass(frozen=True)
class Chunk:
    """Records of one shard in a row, or several texts that are shards of their own; small enough to send to a process.

    Attributes:
        kind: what a record is: the bytes of a ``text`` or of a ``line`` of JSON; a ``row``, read from JSON; an
            ``escaped`` one, and one of a ``csv`` file, whose undecodable bytes are surrogates; a row of an Arrow ``table``; ``tokens``.
        names: of the shards.
        records: the records; those of a table as an Arrow stream.
        count: how many they are.
        first: number of the first one, from 1; 0 if every record is a shard of its own.
        shard: index of its shard, or of the first one.
        bytes_done: how far the shards have been read.
    """

    kind: Kind
    names: tuple[str, ...]
    records: Any
    count: int
    first: int = 0
    shard: int = 0
    bytes_done: int = 0

    def name(self, index: int) -> str:
        """What messages call a record."""
        return self.names[index] if self.first == 0 else f"{self.names[0]}:{self.first + index}"


class Shard(Protocol):
    """A file, or a table, whose records are read in order."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def size(self) -> int:
        """In bytes; 0 if it is not known."""

    def stamp(self) -> object:
        """What changes when its content does, as far as can be told without reading it."""

    def chunks(self, skip: int) -> Iterator[Chunk]:
        """All records but the first ``skip``, with ``bytes_done`` of this shard alone. Raises ``DataError``."""


def read_chunks(shards: Sequence[Shard], *, first: int = 0, skip: int = 0) -> Iterator[Chunk]:
    """The records of all shards in order, from record ``skip`` of shard ``first`` on; short texts together."""
    before, texts = sum(shard.size for shard in shards[:first]), None
    for index in range(first, len(shards)):
        for chunk in shards[index].chunks(skip if index == first else 0):
            placed = replace(chunk, shard=index, bytes_done=before + chunk.bytes_done)
            if texts is not None:
                if placed.first == 0 and _text_bytes(texts) + _text_bytes(placed) <= CHUNK_BYTES:
                    texts = _joined(texts, placed)
                    continue
                yield texts
                texts = None
            if placed.first == 0:
                texts = placed
            else:
                yield placed
        before += shards[index].size
    if texts is not None:
        yield texts


def _text_bytes(chunk: Chunk) -> int:
    return sum(map(len, chunk.records))


def _joined(chunk: Chunk, other: Chunk) -> Chunk:
    return replace(
        chunk,
        names=chunk.names + other.names,
        records=[*chunk.records, *other.records],
        count=chunk.count + other.count,
        bytes_done=other.bytes_done,
    )
