"""Global batches: complete epochs, budgets and exact resuming."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.data import BatchSampler, DataError

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
    assert state["epoch"] == 1
    assert 0 < state["position"] < len(LENGTHS)
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
