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
    Placement,
    Plan,
    PlanError,
    Receive,
    Send,
    backward_order,
    build_replica,
    cut,
    default_warmup,
    num_splits,
    placement_named,
    whole,
)
from infinipipe.verify.plans import random_chunks, random_placement


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
        "def one_by_one(pipelines, placement, warmup):\n"
        "    n = sum(len(chunks) for chunks in pipelines)\n"
        "    return [[a for i in range(n) for a in (Forward(i), Backward(i))]] * placement.num_stages\n"
    )
    lengths = (5, 6)
    pipeline = Pipeline((Chunk(whole(lengths, [0])), Chunk(whole(lengths, [1]))))
    replica = build_replica([pipeline], 2, schedule=f"{path}:one_by_one")
    Plan((1, 1), lengths, (replica,)).validate()
    assert words(replica.actions[0]) == "F0 B0 F1 B1"


def test_a_schedule_that_is_not_known_is_named() -> None:
    with pytest.raises(PlanError, match="there is no schedule '2f2b'; use one of 1f1b, gpipe, interleaved"):
        build_replica([], 1, schedule="2f2b")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "must return one list of actions, such as .*, for each of the 2 stages"),
        ("return [[Forward(0), Backward(0)]]", "must return one list of actions"),
        ("return [['F0', 'B0']] * 2", "must return one list of actions"),
        ("return [[Forward(0)]] * 2", "cannot run: stage 0 never runs chunk 0 backward"),
        ("return [[Backward(0), Forward(0)]] * 2", "cannot run: stage 0, action B0"),
        ("return [[Forward(0), Backward(0), Backward(-1)]] * 2", "cannot run: stage 0, action B-1"),
        ("return [[Forward(7), Backward(7)]] * 2", "cannot run: stage 0, action F7: there are 1 chunks"),
        ("return 1 / (placement.num_stages - 2)", "mine.py:order fails at line 3: ZeroDivisionError"),
    ],
)
def test_a_schedule_that_goes_wrong_is_named(body: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        f"from infinipipe.plan import Backward, Forward\ndef order(pipelines, placement, warmup):\n    {body}\n"
    )
    with pytest.raises(PlanError, match=message) as caught:
        build_replica([Pipeline((Chunk(whole((5,), [0])),))], 2, schedule=f"{path}:order")
    assert f"{path}:order" in str(caught.value)


def test_warmup_must_name_every_stage() -> None:
    with pytest.raises(PlanError, match="warmup names 1 stages, but there are 2"):
        build_replica([], 2, warmup=[1])


@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from(["interleaved", "zero-bubble"]))
@settings(max_examples=150, deadline=None)
def test_any_chunks_and_placement_give_legal_schedules(seed: int, num_stages: int, schedule: str) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 9, 50]) for _ in range(rng.randint(1, 8))]
    pipeline = Pipeline(tuple(random_chunks(rng, lengths, range(len(lengths)), max_slices=6)))
    placement = random_placement(rng, num_stages)
    warmup = [rng.randint(0, 5) for _ in range(num_stages)] if rng.random() < 0.5 else None
    replica = build_replica([pipeline], placement, schedule=schedule, warmup=warmup)
    Plan((1,) * placement.num_parts, tuple(lengths), (replica,)).validate()


@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_halves_of_backwards_hold_no_more_than_1f1b(num_stages: int, num_slices: int) -> None:
    """Chunks between their forward and their weight gradients, at most: on every stage as many as on 1F1B's first."""
    pipeline, _ = split_pipeline(64, num_slices, 12)
    held = build_replica([pipeline], num_stages, schedule="zero-bubble")
    most = num_stages + num_splits(pipeline.chunks) - 1
    for actions in held.actions:
        now = peak = 0
        for action in actions:
            now += {"F": 1, "I": 0, "W": -1}[action.kind.value]
            peak = max(peak, now)
        assert peak <= most


def test_placements_are_what_their_names_say() -> None:
    assert Placement.interleaved(2, 3).parts == ((0, 2, 4), (1, 3, 5))
    assert Placement.v_shaped(3).parts == ((0, 5), (1, 4), (2, 3))
    assert Placement.v_shaped(2, 3).parts == ((0, 3, 4), (1, 2, 5))
    assert Placement.v_shaped(3).stage_of == (0, 1, 2, 2, 1, 0)
    assert placement_named("plain", 3, 1).is_plain
    with pytest.raises(ValueError, match="no placement 'w'; use one of plain, interleaved, v"):
        placement_named("w", 2, 2)
    with pytest.raises(ValueError, match="needs at least 2 parts on each stage, not 1"):
        placement_named("v", 2, 1)
    with pytest.raises(ValueError, match="1 part on each stage, not 2"):
        placement_named("plain", 2, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "tapered", "lookahead"])
def test_schedules_of_one_part_refuse_several(schedule: str) -> None:
    lengths = (8,)
    with pytest.raises(PlanError, match=f"the schedule {schedule} has one part .* 4 parts on 2 stages"):
        build_replica([Pipeline((Chunk(whole(lengths, [0])),))], Placement.v_shaped(2), schedule=schedule)


@given(st.integers(0, 10_000), st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_messages_pair_up_in_number_order_and_size(seed: int, num_stages: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 9, 50]) for _ in range(rng.randint(1, 8))]
    pipeline = Pipeline(tuple(random_chunks(rng, lengths, range(len(lengths)), max_slices=6)))
    placement = random_placement(rng, num_stages)
    replica = build_replica([pipeline], placement, schedule=rng.choice(["interleaved", "zero-bubble"]))
    programs = [replica.program.operations(stage) for stage in range(num_stages)]
    sent, received = (
        {
            channel: [
                (stage, o.chunk, o.num_tokens)
                for stage, p in enumerate(programs)
                for o in p
                if isinstance(o, kind) and o.channel == channel
            ]
            for channel in replica.program.channels
        }
        for kind in (Send, Receive)
    )
    for channel in replica.program.channels:
        source, target = placement.stage_of[channel.source], placement.stage_of[channel.target]
        assert {stage for stage, _, _ in sent[channel]} <= {source}
        assert {stage for stage, _, _ in received[channel]} <= {target}
        assert [message[1:] for message in sent[channel]] == [message[1:] for message in received[channel]]
        assert len(sent[channel]) == (0 if source == target else len(pipeline.chunks))


def test_receives_are_posted_one_action_ahead() -> None:
    lengths = (8,) * 4
    pipeline = Pipeline(tuple(Chunk(whole(lengths, [i])) for i in range(4)))
    program = build_replica([pipeline], 3).program.operations(1)
    for direction in Direction:
        posted = 0
        used = 0
        for operation in program:
            if isinstance(operation, Receive) and operation.channel.direction == direction:
                posted += 1
            if isinstance(operation, Compute) and operation.action.kind.row.flow == direction:
                used += 1
                assert posted == min(used + 1, 4)
