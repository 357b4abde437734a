"""Schedules and the communication pass."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinipipe.plan import (
    ActionKind,
    Chunk,
    Compute,
    Direction,
    Pipeline,
    Plan,
    PlanError,
    Receive,
    Send,
    backward_order,
    build_replica,
    cut,
    default_warmup,
    operations,
    whole,
)
from infinipipe.verify.plans import random_chunks


def words(plan: list[str] | tuple[object, ...]) -> str:
    return " ".join(map(str, plan))


def split_pipeline(length: int, num_slices: int, num_whole: int) -> tuple[Pipeline, tuple[int, ...]]:
    lengths = (length, *([8] * num_whole))
    pieces = cut(0, length, [length * i // num_slices for i in range(1, num_slices)])
    chunks = [Chunk((piece,)) for piece in pieces] + [Chunk(whole(lengths, [1 + i])) for i in range(num_whole)]
    return Pipeline(tuple(chunks)), lengths


def test_1f1b_of_whole_sequences_is_the_textbook_one() -> None:
    lengths = (8,) * 5
    pipeline = Pipeline(tuple(Chunk(whole(lengths, [i])) for i in range(5)))
    replica = build_replica([pipeline], 3)
    assert [words(actions) for actions in replica.actions] == [
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_1f1b_of_slices_goes_backward_in_reverse() -> None:
    pipeline, _ = split_pipeline(30, 3, 2)
    assert backward_order(pipeline.chunks) == [2, 1, 0, 3, 4]
    replica = build_replica([pipeline], 2)
    assert [words(actions) for actions in replica.actions] == [
        "F0 F1 F2 F3 B2 F4 B1 B0 B3 B4",
        "F0 F1 F2 B2 F3 B1 F4 B0 B3 B4",
    ]


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("num_slices", [1, 3, 8])
def test_warmup_is_the_papers(num_stages: int, num_slices: int) -> None:
    pipeline, _ = split_pipeline(64, num_slices, 20)
    replica = build_replica([pipeline], num_stages)
    expected = [num_stages - (stage + 1) + num_slices - 1 for stage in range(num_stages)]
    assert default_warmup(pipeline.chunks, num_stages) == expected
    for stage, actions in enumerate(replica.actions):
        first = next(i for i, action in enumerate(actions) if action.kind == ActionKind.BACKWARD)
        assert first == expected[stage] + 1


@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from(["1f1b", "gpipe"]))
@settings(max_examples=200, deadline=None)
def test_any_chunks_give_legal_schedules(seed: int, num_stages: int, schedule: str) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 9, 50]) for _ in range(rng.randint(1, 8))]
    pipeline = Pipeline(tuple(random_chunks(rng, lengths, range(len(lengths)), max_slices=6)))
    warmup = None
    if schedule == "1f1b" and rng.random() < 0.5:
        warmup = sorted((rng.randint(0, 6) for _ in range(num_stages)), reverse=True)
    replica = build_replica([pipeline], num_stages, schedule=schedule, warmup=warmup)
    Plan((1,) * num_stages, tuple(lengths), (replica,)).validate()


def test_an_increasing_warmup_is_found_to_deadlock() -> None:
    lengths = (8,) * 4
    pipeline = Pipeline(tuple(Chunk(whole(lengths, [i])) for i in range(4)))
    replica = build_replica([pipeline], 2, warmup=[0, 2])
    with pytest.raises(PlanError, match="deadlock: stage 0 at B0, stage 1 at F1"):
        Plan((1, 1), lengths, (replica,)).validate()


def test_a_users_schedule_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from infinipipe.plan import Backward, Forward\n"
        "def one_by_one(pipelines, num_stages, warmup):\n"
        "    n = sum(len(chunks) for chunks in pipelines)\n"
        "    return [[a for i in range(n) for a in (Forward(i), Backward(i))]] * num_stages\n"
    )
    lengths = (5, 6)
    pipeline = Pipeline((Chunk(whole(lengths, [0])), Chunk(whole(lengths, [1]))))
    replica = build_replica([pipeline], 2, schedule=f"{path}:one_by_one")
    Plan((1, 1), lengths, (replica,)).validate()
    assert words(replica.actions[0]) == "F0 B0 F1 B1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("2f2b", "there is no schedule '2f2b'; use one of 1f1b, gpipe"),
        ("absent.py:f", "cannot load the schedule file"),
        ("{tmp}/broken.py:f", "fails when loaded: ZeroDivisionError"),
        ("{tmp}/empty.py:f", "has no function 'f'"),
    ],
)
def test_a_schedule_that_cannot_be_had_is_named(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(PlanError, match=message):
        build_replica([], 1, schedule=name.format(tmp=tmp_path))


def test_warmup_must_name_every_stage() -> None:
    with pytest.raises(PlanError, match="warmup names 1 stages, but there are 2"):
        build_replica([], 2, warmup=[1])


@given(st.integers(0, 10_000), st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_messages_pair_up_in_number_order_and_size(seed: int, num_stages: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 9, 50]) for _ in range(rng.randint(1, 8))]
    pipeline = Pipeline(tuple(random_chunks(rng, lengths, range(len(lengths)), max_slices=6)))
    replica = build_replica([pipeline], num_stages)
    programs = [operations(replica, stage) for stage in range(num_stages)]
    for stage, program in enumerate(programs):
        for direction, step in ((Direction.FORWARD, 1), (Direction.BACKWARD, -1)):
            sent = [(o.chunk, o.num_tokens) for o in program if isinstance(o, Send) and o.direction == direction]
            if not 0 <= stage + step < num_stages:
                assert not sent
                continue
            received = [
                (o.chunk, o.num_tokens)
                for o in programs[stage + step]
                if isinstance(o, Receive) and o.direction == direction
            ]
            assert sent == received
            assert len(sent) == len(pipeline.chunks)


def test_receives_are_posted_one_action_ahead() -> None:
    lengths = (8,) * 4
    pipeline = Pipeline(tuple(Chunk(whole(lengths, [i])) for i in range(4)))
    program = operations(build_replica([pipeline], 3), 1)
    for direction, kind in ((Direction.FORWARD, ActionKind.FORWARD), (Direction.BACKWARD, ActionKind.BACKWARD)):
        posted = 0
        used = 0
        for operation in program:
            if isinstance(operation, Receive) and operation.direction == direction:
                posted += 1
            if isinstance(operation, Compute) and operation.action.kind == kind:
                used += 1
                assert posted == min(used + 1, 4)
