"""Tokenized corpora of Megatron-LM: a file of tokens (.bin) with an index (.idx).

The index, as ``megatron/core/datasets/indexed_dataset.py`` of NVIDIA/Megatron-LM writes it: ``MMIDIDX`` and two zero bytes; a version, 1, of
eight bytes; one byte for the type of the tokens; the numbers of sequences and of document borders, eight bytes each; lengths of
sequences (int32), their places in bytes (int64), and the sequence at which each document begins, with the end (int64). All is little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infinipipe.data.documents import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class IndexedTokens:
    """Documents of tokens, mapped into memory.

    Attributes:
        content: the bytes of the file of tokens.
        dtype: of the tokens.
        lengths, places: of every sequence, in tokens and bytes.
        borders: the sequence at which each document begins, and the end.
    """

    content: NDArray[np.uint8]
    dtype: np.dtype[np.integer]
    lengths: NDArray[np.int32]
    places: NDArray[np.int64]
    borders: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.borders) - 1

    def tokens(self, document: int) -> NDArray[np.integer]:
        """The tokens of a document, shape (length,), those of its sequences one after another."""
        parts = [
            self.content[place : place + int(length) * self.dtype.itemsize].view(self.dtype)
            for sequence in range(self.borders[document], self.borders[document + 1])
            for place, length in [(int(self.places[sequence]), self.lengths[sequence])]
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=self.dtype)


def read_indexed(index: Path) -> IndexedTokens:
    """The documents of an index and of the .bin file beside it. Raises ``DataError`` for what is none."""
    tokens = index.with_suffix(".bin")
    if not tokens.is_file():
        raise DataError(f"{index} is an index without its tokens: there is no {tokens}")
    content = np.fromfile(index, dtype=np.uint8)
    if not content[: len(MAGIC)].tobytes() == MAGIC:
        raise DataError(f"{index} is no index of Megatron-LM: it does not begin with {MAGIC[:7].decode()}")
    if len(content) < _HEADER.size:
        raise DataError(f"{index} is cut off: it ends within its header")
    _, version, code, num_sequences, num_borders = _HEADER.unpack(content[: _HEADER.size].tobytes())
    if version != 1 or code not in _TYPES:
        raise DataError(f"{index} is an index of version {version} with tokens of type {code}, which is not known")
    sizes = [4 * num_sequences, 8 * num_sequences, 8 * num_borders]
    if _HEADER.size + sum(sizes) > len(content) or num_borders < 1:
        raise DataError(f"{index} is cut off: it should hold {num_sequences} sequences")
    starts = np.cumsum([_HEADER.size, *sizes])
    lengths, places, borders = (
        content[start : start + size].view(dtype)
        for start, size, dtype in zip(starts[:-1], sizes, ("<i4", "<i8", "<i8"), strict=True)
    )
    dtype = np.dtype(_TYPES[code])
    stored = np.memmap(tokens, dtype=np.uint8, mode="r") if tokens.stat().st_size else np.zeros(0, dtype=np.uint8)
    ends = places + lengths.astype(np.int64) * dtype.itemsize
    if (lengths < 0).any() or (places < 0).any() or (len(ends) and ends.max() > len(stored)):
        raise DataError(f"{tokens} is cut off, or of another index than {index}: it has {len(stored)} bytes")
    if borders[0] != 0 or borders[-1] != num_sequences or (np.diff(borders) < 0).any():
        raise DataError(f"{index} is damaged: its documents do not divide its {num_sequences} sequences")
    return IndexedTokens(stored, dtype, lengths, places, borders)
