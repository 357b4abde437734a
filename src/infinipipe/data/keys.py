"""Hashes that stand for documents, whatever else is in the corpus: orders made of them survive that some are taken out."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]


def mixed(keys: Keys, *salts: int) -> Keys:
    """Another 64-bit hash of each key for other ``salts`` (the finalizer of splitmix64)."""
    digest = hashlib.blake2b(repr(salts).encode(), digest_size=8).digest()
    x = keys ^ np.frombuffer(digest, dtype=np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def distinct(keys: Keys) -> Keys:
    """The keys, with another one for every repetition of the same."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_first = np.append(True, ordered[1:] != ordered[:-1])
    if is_first.all():
        return keys
    places = np.arange(len(keys))
    repetition = places - np.maximum.accumulate(np.where(is_first, places, 0))
    found = keys.copy()
    again = repetition > 0
    found[order[again]] = mixed(ordered[again] + repetition[again].astype(np.uint64))
    return found
