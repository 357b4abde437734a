"""Global batches: complete epochs, budgets and exact resuming."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.data import BatchSampler, DataError
from infinipipe.data.keys import distinct

LENGTHS = np.arange(1, 24)


def sampler(seed: int = 1, sequences: int = 4, tokens: int = 0) -> BatchSampler:
    return BatchSampler(LENGTHS, sequences_per_step=sequences, tokens_per_step=tokens, seed=seed)


def test_every_epoch_visits_every_sequence_once_in_another_order() -> None:
    batches = sampler(sequences=1)
    first, second = ([batches.next()[0] for _ in LENGTHS] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(len(LENGTHS)))
    assert first != second
    assert batches.epoch == 2


def test_batches_go_on_over_the_end_of_an_epoch() -> None:
    batches = sampler(sequences=len(LENGTHS) - 1)
    assert [len(batches.next()) for _ in range(3)] == [len(LENGTHS) - 1] * 3


def test_seed_decides_the_order() -> None:
    assert [sampler(1).next() for _ in range(2)] == [sampler(1).next() for _ in range(2)]
    assert sampler(1).next() != sampler(2).next()


@given(steps=st.integers(0, 30), sequences=st.integers(1, 30), tokens=st.sampled_from([0, 10, 60]))
def test_resuming_is_exact(steps: int, sequences: int, tokens: int) -> None:
    straight = sampler(sequences=sequences, tokens=tokens)
    for _ in range(steps):
        straight.next()
    resumed = sampler(sequences=sequences, tokens=tokens)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert [resumed.next() for _ in range(30)] == [straight.next() for _ in range(30)]


def test_resuming_in_the_middle_of_the_second_epoch() -> None:
    straight = sampler(sequences=5)
    for _ in range(7):
        straight.next()
    state = straight.state_dict()
    (order,) = state["orders"]
    assert order["epoch"] == 1
    assert 0 < order["position"] < len(LENGTHS)
    resumed = sampler(sequences=5)
    resumed.load_state_dict(state)
    assert [resumed.next() for _ in range(10)] == [straight.next() for _ in range(10)]


@given(st.integers(1, 60))
def test_token_budget_is_kept_except_by_a_single_sequence(tokens: int) -> None:
    batches = sampler(sequences=100, tokens=tokens)
    for _ in range(20):
        batch = batches.next()
        assert len(batch) == 1 or sum(LENGTHS[batch]) <= tokens


@pytest.mark.parametrize("other", [sampler(2), sampler(1, sequences=5), sampler(1, tokens=50)])
def test_state_of_other_settings_is_refused(other: BatchSampler) -> None:
    with pytest.raises(DataError, match="another corpus, seed or batch size"):
        sampler(1).load_state_dict(other.state_dict())


def test_no_sequences_are_refused() -> None:
    with pytest.raises(DataError, match="no sequences"):
        BatchSampler(np.arange(0), sequences_per_step=1)


def keyed(keys: list[int], sequences: int = 3, **settings: Any) -> BatchSampler:
    """A sampler of sequences of as many tokens as their key says, so that batches can be compared by keys."""
    lengths = np.asarray(keys, dtype=np.int64)
    return BatchSampler(lengths, sequences_per_step=sequences, keys=lengths.astype(np.uint64), **settings)


@given(
    taken_out=st.sets(st.sampled_from(range(1, 41)), max_size=9),
    added=st.sets(st.integers(41, 60), max_size=9),
    steps=st.integers(0, 25),
)
def test_the_others_keep_their_order_when_some_are_taken_out_or_added(
    taken_out: set[int], added: set[int], steps: int
) -> None:
    before, after = (
        list(range(1, 41)),
        [key for key in range(1, 61) if key not in taken_out and (key <= 40 or key in added)],
    )
    straight = keyed(before)
    for _ in range(steps):
        straight.next()
    state = straight.state_dict()
    resumed = keyed(after)
    lines = resumed.load_state_dict(json.loads(json.dumps(state)))
    assert bool(lines) == (before != after)
    epoch, rest = straight.epoch, []
    while straight.epoch == epoch:
        rest += [before[index] for index in straight.next()]
    left_of_epoch = [key for key in rest if key not in taken_out]
    drawn = [after[index] for _ in range(20) for index in resumed.next()]
    assert [key for key in drawn if key <= 40][: len(left_of_epoch)] == left_of_epoch


def test_a_mostly_other_corpus_is_refused() -> None:
    state = keyed(list(range(1, 41))).state_dict()
    with pytest.raises(DataError, match="another corpus"):
        keyed(list(range(30, 70))).load_state_dict(state)
    (line,) = keyed(list(range(1, 40))).load_state_dict(state)
    assert line.startswith("the corpus has changed since: 97.5% of the sequences then and now are the same")
    with pytest.raises(DataError, match="another corpus"):
        sampler().load_state_dict({"epoch": 0, "position": 0, "corpus": "abc"})


def test_how_much_is_common_is_estimated_for_large_corpora() -> None:
    keys = np.random.default_rng(0).integers(0, 2**63, 20_000).tolist()
    state = keyed(keys[:19_000]).state_dict()
    (line,) = keyed(keys[1_000:]).load_state_dict(state)
    share = float(line.split("since: ")[1].split("%")[0])
    assert abs(share - 90) < 10
    with pytest.raises(DataError, match="another corpus"):
        keyed(keys[15_000:]).load_state_dict(state)


def test_equal_documents_are_told_apart() -> None:
    keys = np.asarray([5, 7, 5, 5, 7, 9], dtype=np.uint64)
    found = distinct(keys)
    assert len(set(found.tolist())) == 6
    assert found[[0, 1, 5]].tolist() == [5, 7, 9]
    batches = BatchSampler(np.ones(6, dtype=np.int64), sequences_per_step=6, keys=found)
    assert sorted(batches.next()) == list(range(6))


def test_orders_look_random() -> None:
    batches = BatchSampler(np.ones(2000, dtype=np.int64), sequences_per_step=2000, seed=3)
    first, second = np.asarray(batches.next()), np.asarray(batches.next())
    for order in (first, second):
        assert abs(np.corrcoef(order, np.arange(2000))[0, 1]) < 0.1
    assert abs(np.corrcoef(np.argsort(first), np.argsort(second))[0, 1]) < 0.1


@given(weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=3), steps=st.integers(0, 30))
def test_sources_give_tokens_by_their_weights_and_resume_exactly(weights: list[float], steps: int) -> None:
    lengths = np.asarray([1 + (7 * number) % 50 for number in range(90)])
    sources = np.asarray([number % len(weights) for number in range(90)])

    def made() -> BatchSampler:
        return BatchSampler(lengths, sequences_per_step=8, sources=sources, weights=weights, seed=1)

    straight = made()
    for _ in range(steps):
        straight.next()
    resumed = made()
    assert resumed.load_state_dict(json.loads(json.dumps(straight.state_dict()))) == []
    drawn = [straight.next() for _ in range(60)]
    assert [resumed.next() for _ in range(60)] == drawn
    tokens = [
        sum(int(lengths[i]) for batch in drawn for i in batch if sources[i] == source) for source in range(len(weights))
    ]
    for count, weight in zip(tokens, weights, strict=True):
        assert count / sum(tokens) == pytest.approx(weight / sum(weights), abs=0.02)


def test_every_source_has_complete_epochs_of_its_own() -> None:
    lengths, sources = np.ones(30, dtype=np.int64), np.asarray([0] * 10 + [1] * 20)
    batches = BatchSampler(lengths, sequences_per_step=2, sources=sources, weights=[1, 1])
    drawn = [index for _ in range(20) for index in batches.next()]
    of_first, of_second = [i for i in drawn if i < 10], [i for i in drawn if i >= 10]
    assert sorted(of_first[:10]) == sorted(of_first[10:]) == list(range(10))
    assert sorted(of_second) == list(range(10, 30))
    assert of_first[:10] != of_first[10:]
    assert batches.epoch == 1


def test_steps_hash_nothing_of_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = BatchSampler(np.ones(1000, dtype=np.int64), sequences_per_step=4)

    def refuse(*_: object) -> None:
        raise AssertionError("hashed")

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "blake2b", refuse)
        patch.setattr(hashlib, "sha256", refuse)
        for _ in range(20):
            batches.next()
            assert len(json.dumps(batches.state_dict())) < 5000
