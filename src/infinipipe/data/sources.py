"""What a source is read from: the files that it names, or a dataset; and which of its documents are left out by name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from infinipipe.data.cache import TokenCache
from infinipipe.data.find import find_files
from infinipipe.data.readers import FileShard
from infinipipe.data.settings import DataSettings
from infinipipe.data.shards import Shard


def find_shards(settings: DataSettings) -> list[Shard]:
    """The files, or the tables, of a source. Raises ``DataError`` if there are none."""
    if settings.dataset:
        from infinipipe.data.hub import find_dataset

        return list(find_dataset(settings))
    return [FileShard(path, settings) for path in find_files(settings)]


def left_out(settings: DataSettings, cache: TokenCache) -> NDArray[np.bool_]:
    """Which documents a pattern of ``data.exclude`` names by ``path:number``; the others are heeded when files are found."""
    chosen = np.zeros(len(cache), dtype=bool)
    patterns = document_patterns(settings.exclude)
    if not patterns:
        return chosen
    names = cache.shard_names()
    for path, number in patterns:
        of_shard = np.asarray([fnmatchcase(name, path) for name in names], dtype=bool)
        chosen |= of_shard[cache.shards] & (cache.numbers == number)
    return chosen


def document_patterns(patterns: Sequence[str]) -> list[tuple[str, int]]:
    """Those patterns that name documents: the one of the file, and the number."""
    divided = [pattern.rpartition(":") for pattern in patterns]
    return [(path, int(number)) for path, _, number in divided if path and number.isdecimal()]
