"""Algorithm 1, its note, and the other ways to cut and pack."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinipipe.plan import Chunk
from infinipipe.planner.baselines.cutting import cut_and_pack, equal_tokens, terapipe_borders
from infinipipe.planner.chunking import (
    Bucket,
    Chunking,
    SliceTime,
    TokenOverflowError,
    balanced_borders,
    balanced_chunking,
    even_chunking,
    pack,
)

TIME = SliceTime(1 / 2000, 1.0)


def seconds(chunk: Chunk) -> float:
    return sum(TIME(piece.start, piece.stop) for piece in chunk.slices)


def assert_covers(chunking: Chunking, lengths: list[int]) -> None:
    reached = [0] * len(lengths)
    for chunk in chunking.ordered():
        for place, piece in enumerate(chunk.slices):
            assert piece.start == reached[piece.sequence]
            assert place == 0 or piece.is_whole
            reached[piece.sequence] = piece.stop
    assert reached == lengths


@settings(deadline=None)
@given(st.integers(1, 100_000), st.integers(1, 40))
def test_borders_cut_into_equal_times(length: int, num_slices: int) -> None:
    edges = [0, *balanced_borders(length, num_slices, TIME), length]
    assert edges == sorted(set(edges))
    share = TIME(0, length) / num_slices
    if len(edges) == num_slices + 1:
        for start, stop in itertools.pairwise(edges):
            assert abs(TIME(start, stop) - share) <= 2 * (TIME(stop - 1, stop) + TIME(start, start + 1))


def test_long_sequences_share_the_mesh_and_tails_take_short_ones() -> None:
    lengths = [8000, 5000, 300, 200, 100, 50]
    chunking = balanced_chunking(lengths, range(6), 4, TIME, token_capacity=10**9)
    first, second = chunking.cut
    assert [chunk.slices[0].start for chunk in second] == [chunk.slices[0].start for chunk in first][: len(second)]
    assert len(first) == 4
    assert any(len(chunk.slices) > 1 for chunk in (first[-1], second[-1]))
    assert_covers(chunking, lengths)
    with pytest.raises(TokenOverflowError, match="token capacity of 100"):
        balanced_chunking(lengths, range(6), 4, TIME, token_capacity=100)


def test_loosening_ends_where_the_printed_loop_would_not() -> None:
    """The least-loaded bucket has no token room: loosening to *its* time would never admit the sequence."""
    full_but_quick = Bucket(seconds=1.0, tokens=100, wholes=[9])
    slow_but_roomy = Bucket(seconds=50.0, tokens=10, wholes=[8])
    lengths = [60]
    buckets = pack([full_but_quick, slow_but_roomy], [0], lengths, TIME, target_seconds=40.0, target_tokens=100)
    assert len(buckets) == 2
    assert buckets[1].wholes == [8, 0]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 50), st.integers(1, 20_000)), min_size=1, max_size=60),
    st.integers(1, 20),
)
def test_every_way_covers_every_token(lengths: list[int], num_slices: int) -> None:
    everything = range(len(lengths))
    longest = max(lengths)
    paper = balanced_chunking(lengths, everything, num_slices, TIME, token_capacity=longest)
    assert_covers(paper, lengths)
    target = TIME(0, longest) / num_slices
    even = even_chunking(lengths, everything, target, TIME, token_limit=max(1, longest // 2))
    assert_covers(even, lengths)
    assert all(chunk.num_tokens <= max(1, longest // 2) for chunk in even.ordered())
    size = max(1, -(-longest // num_slices))
    fixed = cut_and_pack(lengths, everything, equal_tokens(size), size)
    assert_covers(fixed, lengths)
    assert all(chunk.num_tokens <= size for chunk in fixed.ordered())


@pytest.mark.parametrize("lengths", [[1], [1] * 50, [7] * 10_000, [200_000], [200_000, *[3] * 10_000]])
def test_extreme_batches(lengths: list[int]) -> None:
    for num_slices in (1, 3, 16):
        assert_covers(balanced_chunking(lengths, range(len(lengths)), num_slices, TIME, token_capacity=10**9), lengths)


def test_terapipe_takes_the_fewest_slices_on_its_grid() -> None:
    borders = terapipe_borders(500.0, TIME, cells=1000)(4000)
    edges = [0, *borders, 4000]
    assert all(TIME(a, b) <= 500.0 for a, b in itertools.pairwise(edges))
    assert len(edges) - 1 <= -(-TIME(0, 4000) // 500.0) + 1
    assert terapipe_borders(1e9, TIME)(4000) == []
