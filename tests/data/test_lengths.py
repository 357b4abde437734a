"""Buckets of lengths, and what every policy for documents that are too long would make of a corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.data import DataSettings, SourceSettings, TokenizerSettings, open_corpus
from infinipipe.data.lengths import POLICIES, LengthBucket, PolicyOutcome, length_buckets, policy_outcomes


@given(st.lists(st.integers(1, 5000), max_size=60))
def test_every_length_is_in_one_bucket(lengths: list[int]) -> None:
    buckets = length_buckets(np.asarray(lengths, dtype=np.int64))
    for bucket in buckets:
        within = [length for length in lengths if bucket.most // 2 < length <= bucket.most]
        assert bucket == LengthBucket(bucket.most, len(within), sum(within))
    assert sum(bucket.tokens for bucket in buckets) == sum(lengths)
    if buckets:
        assert buckets[0].sequences
        assert buckets[-1].sequences
        assert [bucket.most * 2 for bucket in buckets[:-1]] == [bucket.most for bucket in buckets[1:]]


@pytest.mark.parametrize("policy", POLICIES)
def test_outcomes_are_those_of_the_policies(tmp_path: Path, policy: Any) -> None:
    records: list[dict[str, Any]] = [{"text": "b" * size} for size in (3, 40, 90)]
    records += [{"prompt": "c" * 50, "completion": "d" * 9}, {"text": "a"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "b.txt").write_text("e" * 33)
    sources = {name: SourceSettings(files=[str(tmp_path / f"{name}.*")]) for name in "ab"}
    settings = DataSettings(
        sources=sources,
        exclude=["*:5"],
        cache=str(tmp_path / "cache"),
        held_out=0,
        max_length=32,
        on_too_long=policy,
    )
    corpus = open_corpus(settings, TokenizerSettings(vocab_size=257))
    (own,) = [outcome for outcome in policy_outcomes(corpus.train.caches, settings) if outcome.policy == policy]
    train = corpus.train
    documents = {(int(source), int(place)) for source, place in zip(train.sources, train.documents, strict=True)}
    assert own == PolicyOutcome(policy, len(train), int(train.lengths.sum()), 5 - len(documents))
