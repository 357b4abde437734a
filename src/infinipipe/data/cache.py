"""Tokenized documents: on disk, written once and memory-mapped from then on, or in memory."""

from __future__ import annotations

import json
import zipfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinipipe.data.documents import DataError, ReadCounts

VERSION = 2
_ARRAYS = {
    "ends": np.int64,
    "spans": np.int64,
    "span_ends": np.int64,
    "weights": np.float32,
    "keys": np.uint64,
    "shards": np.int32,
    "numbers": np.int64,
    "unigrams": np.int64,
}


@dataclass(frozen=True)
class TokenizedChunk:
    """The documents of a chunk, tokenized.

    Attributes:
        tokens: of all, one after another.
        lengths: of each.
        spans: learnt spans of each document's tokens, one after another, shape (spans, 2).
        span_counts: how many each has.
        weights: of each in the loss.
        keys: a hash of each.
        shards: the shard of each.
        numbers: its number there from 1, or 0 in a shard of one.
        counts: what was met.
        shard: the chunk's first shard.
        skipped: records of that before the chunk.
        records: how many records the chunk had.
        bytes_done: how far the shards have been read.
    """

    tokens: NDArray[np.unsignedinteger[Any]]
    lengths: NDArray[np.int64]
    spans: NDArray[np.int64]
    span_counts: NDArray[np.int64]
    weights: NDArray[np.float32]
    keys: NDArray[np.uint64]
    shards: NDArray[np.int32]
    numbers: NDArray[np.int64]
    counts: ReadCounts
    shard: int
    skipped: int
    records: int
    bytes_done: int


@dataclass(frozen=True)
class TokenCache:
    """Tokenized documents of one source.

    Attributes:
        tokens: all documents' tokens, one after another, memory-mapped where they are on disk.
        ends: where each document ends in ``tokens``.
        spans: learnt spans of each document's own tokens, one after another, shape (spans, 2).
        span_ends: where those of each document end in ``spans``.
        weights: of each document in the loss.
        keys: a 64-bit hash of what each document says.
        shards: the file of each document.
        numbers: its number there from 1, or 0 in a file of one.
        unigrams: how often each token is learnt in all of them.
        largest_id: the largest id among the tokens, learnt or not; -1 if there are none.
        counts: what reading met.
        folder: where it lies; ``None`` if in memory.
        names: of the files, if in memory.
    """

    tokens: NDArray[np.unsignedinteger[Any]]
    ends: NDArray[np.int64]
    spans: NDArray[np.int64]
    span_ends: NDArray[np.int64]
    weights: NDArray[np.float32]
    keys: NDArray[np.uint64]
    shards: NDArray[np.int32]
    numbers: NDArray[np.int64]
    unigrams: NDArray[np.int64]
    largest_id: int
    counts: ReadCounts
    folder: Path | None = None
    names: Sequence[str] = field(default=())

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every document."""
        return np.diff(self.ends, prepend=0)

    def learnt(self, document: int) -> NDArray[np.int64]:
        """Spans of the document's tokens that are learnt, shape (spans, 2)."""
        start = self.span_ends[document - 1] if document > 0 else 0
        return self.spans[start : self.span_ends[document]]

    def shard_names(self) -> list[str]:
        """Names of all files."""
        if self.folder is None:
            return list(self.names)
        with (self.folder / "files.txt").open(encoding="utf-8", errors="surrogateescape") as file:
            return [json.loads(line) for line in file]

    def name(self, document: int) -> str:
        """Where a document comes from: the file, with the number in it where it has several."""
        name, number = self.shard_names()[self.shards[document]], int(self.numbers[document])
        return f"{name}:{number}" if number else name


class CacheBuilder:
    """Takes tokenized chunks; writes their tokens to ``file`` if there is one, else keeps them."""

    def __init__(self, dtype: np.dtype[np.unsignedinteger[Any]], largest: int, file: Any = None) -> None:
        self.counts = ReadCounts()
        self._dtype, self._file = dtype, file
        self._columns = {name: array("b") for name in _ARRAYS}
        self._unigrams = np.zeros(largest + 1, dtype=np.int64)
        self._tokens: list[NDArray[np.unsignedinteger[Any]]] = []
        self._num_tokens = self._num_spans = 0
        self._largest_id = -1

    def __len__(self) -> int:
        return self.counts.documents

    def append(self, chunk: TokenizedChunk) -> None:
        """Add the documents of a chunk."""
        self.counts.add(chunk.counts)
        if not len(chunk.lengths):
            return
        if self._file is None:
            self._tokens.append(chunk.tokens)
        else:
            self._file.write(chunk.tokens.tobytes())
        ends = np.cumsum(chunk.lengths)
        values: dict[str, NDArray[Any]] = {
            "ends": ends + self._num_tokens,
            "spans": chunk.spans,
            "span_ends": np.cumsum(chunk.span_counts) + self._num_spans,
            "weights": chunk.weights,
            "keys": chunk.keys,
            "shards": chunk.shards,
            "numbers": chunk.numbers,
        }
        for name, value in values.items():
            self._columns[name].frombytes(value.astype(_ARRAYS[name]).tobytes())
        self._num_tokens += int(ends[-1])
        self._largest_id = max(self._largest_id, int(chunk.tokens.max(initial=0)))
        self._num_spans += len(chunk.spans)
        starts = np.repeat(ends - chunk.lengths, chunk.span_counts)
        self._unigrams += np.bincount(
            chunk.tokens[_inside(chunk.spans + starts[:, None], len(chunk.tokens))], minlength=len(self._unigrams)
        )

    def arrays(self) -> dict[str, Any]:
        """All that is known beside the tokens, by name."""
        found: dict[str, Any] = {
            name: np.frombuffer(self._columns[name].tobytes(), dtype=dtype) for name, dtype in _ARRAYS.items()
        }
        return found | {"spans": found["spans"].reshape(-1, 2), "unigrams": self._unigrams}

    def in_memory(self, names: Sequence[str]) -> TokenCache:
        """The documents, kept in memory."""
        tokens = np.concatenate([np.zeros(0, dtype=self._dtype), *self._tokens])
        return TokenCache(tokens, **self.arrays(), largest_id=self._largest_id, counts=self.counts, names=names)

    def write_index(self, folder: Path, names: Sequence[str]) -> None:
        """Write what stands beside the tokens in ``folder``."""
        np.savez(folder / "index.npz", **self.arrays())
        with (folder / "files.txt").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(name) + "\n" for name in names)
        meta = {
            "version": VERSION,
            "dtype": self._dtype.name,
            "largest_id": self._largest_id,
            "counts": vars(self.counts),
        }
        (folder / "meta.json").write_text(json.dumps(meta) + "\n")


def _inside(spans: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """Which of ``length`` places are in one of ``spans``, which do not overlap."""
    steps = np.zeros(length + 1, dtype=np.int64)
    np.add.at(steps, spans[:, 0], 1)
    np.add.at(steps, spans[:, 1], -1)
    return np.cumsum(steps[:-1]) > 0


def read_cache(folder: Path) -> TokenCache:
    """The tokenized documents of a folder. Raises ``DataError`` if it is damaged."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["version"] != VERSION:
            raise ValueError(f"it is of version {meta['version']}, not {VERSION}")
        with np.load(folder / "index.npz") as index:
            arrays = {name: index[name] for name in _ARRAYS}
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
        if len(tokens) != arrays["ends"][-1]:
            raise ValueError(f"tokens.bin has {len(tokens)} tokens instead of {arrays['ends'][-1]}")
        counts = ReadCounts(**meta["counts"])
        return TokenCache(tokens, **arrays, largest_id=meta["largest_id"], counts=counts, folder=folder)
    except (OSError, ValueError, KeyError, TypeError, EOFError, IndexError, zipfile.BadZipFile) as error:
        raise DataError(
            f"the tokenized corpus {folder} is damaged ({' '.join(str(error).split())}); delete it to have it made again"
        ) from None
