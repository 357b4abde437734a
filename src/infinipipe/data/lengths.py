"""How long the sequences of a corpus are, and what the policies for those too long would make of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infinipipe.data.cache import TokenCache
from infinipipe.data.sequences import fit_length
from infinipipe.data.settings import DataSettings, Policy
from infinipipe.data.sources import left_out

POLICIES: tuple[Policy, ...] = ("drop", "truncate", "split")


@dataclass(frozen=True)
class LengthBucket:
    """The sequences of more than half of ``most`` tokens, up to that.

    Attributes:
        most: a power of two.
        sequences: how many there are.
        tokens: of all of them.
    """

    most: int
    sequences: int
    tokens: int


def length_buckets(lengths: NDArray[np.int64]) -> list[LengthBucket]:
    """Buckets from that of the shortest sequence to that of the longest, empty ones included; ``lengths`` are at least 1."""
    if not len(lengths):
        return []
    powers = np.asarray([(length - 1).bit_length() for length in lengths.tolist()])
    sequences, tokens = np.bincount(powers), np.bincount(powers, weights=lengths)
    return [
        LengthBucket(2**power, int(sequences[power]), int(tokens[power]))
        for power in range(int(powers.min()), int(powers.max()) + 1)
    ]


@dataclass(frozen=True)
class PolicyOutcome:
    """What ``data.on_too_long`` would make of a corpus.

    Attributes:
        policy: its value.
        sequences: that there would be.
        tokens: of all of them.
        documents: of which nothing would be left.
    """

    policy: Policy
    sequences: int
    tokens: int
    documents: int


def policy_outcomes(caches: Sequence[TokenCache], settings: DataSettings) -> list[PolicyOutcome]:
    """Those of every policy; ``caches`` are those of the sources of ``settings``."""
    outcomes = []
    for policy in POLICIES:
        sequences = tokens = lost = 0
        for cache, source in zip(caches, settings.of_sources().values(), strict=True):
            pieces, _ = fit_length(cache, dataclasses.replace(source, on_too_long=policy))
            taken_out = left_out(source, cache)
            pieces = pieces.chosen(~taken_out[pieces.documents])
            sequences += len(pieces.lengths)
            tokens += int(pieces.lengths.sum())
            lost += int((~taken_out).sum()) - len(np.unique(pieces.documents))
        outcomes.append(PolicyOutcome(policy, sequences, tokens, lost))
    return outcomes
