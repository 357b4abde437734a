"""The vocabulary, its JSON and its validation."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinipipe.plan import (
    Action,
    Backward,
    Chunk,
    ChunkKind,
    Forward,
    Pipeline,
    Placement,
    Plan,
    PlanError,
    ReplicaPlan,
    Slice,
    build_replica,
    cut,
    cut_sequences,
    from_json,
    load,
    num_splits,
    save,
    to_json,
    whole,
)

LENGTHS = (100, 10, 20, 50)


def chunks() -> tuple[Chunk, ...]:
    first, second, third = cut(0, 100, [40, 70])
    return (
        Chunk((first,)),
        Chunk((second, *whole(LENGTHS, [1]))),
        Chunk((third, *whole(LENGTHS, [2]))),
        Chunk(whole(LENGTHS, [3])),
    )


def make_plan(num_stages: int = 3) -> Plan:
    replica = build_replica([Pipeline(chunks()[:3]), Pipeline(chunks()[3:])], num_stages)
    return Plan((2,) * num_stages, LENGTHS, (replica,), {"planner": "hand"})


def test_kinds_follow_from_content() -> None:
    assert [chunk.kind for chunk in chunks()] == [
        ChunkKind.SPLIT,
        ChunkKind.HYBRID,
        ChunkKind.HYBRID,
        ChunkKind.BATCHED,
    ]
    assert [chunk.context for chunk in chunks()] == [0, 40, 70, 0]
    assert [chunk.num_tokens for chunk in chunks()] == [40, 40, 50, 50]
    assert num_splits(chunks()) == 3
    assert num_splits(chunks()[3:]) == 1


def test_cut_sequences_name_their_chunks() -> None:
    pieces = cut(7, 90, [30])
    assert cut_sequences([Chunk(pieces[:1]), *chunks(), Chunk(pieces[1:])]) == {7: [0, 5], 0: [1, 2, 3]}
    assert cut_sequences(chunks()[3:]) == {}


def test_json_round_trip_and_hash(tmp_path: Path) -> None:
    plan = make_plan()
    assert from_json(to_json(plan)) == plan
    save(plan, tmp_path / "plan.json")
    assert load(tmp_path / "plan.json").hash == plan.hash
    assert replace(plan, metadata={}).hash == plan.hash
    recompute = ((1, 0, 0, 0), *plan.replicas[0].recompute[1:])
    assert replace(plan, replicas=(replace(plan.replicas[0], recompute=recompute),)).hash != plan.hash
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_random_plans_validate_and_survive_json(seed: int, num_stages: int, num_replicas: int) -> None:
    from infinipipe.verify.plans import random_placement, random_plan

    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 7, 137, 2041]) for _ in range(rng.randint(1, 9))]
    placement = random_placement(rng, num_stages)
    plan = random_plan(rng, lengths, (2,) * placement.num_parts, num_replicas=num_replicas, placement=placement)
    assert from_json(to_json(plan)) == plan


def edit(change: Callable[[ReplicaPlan], ReplicaPlan]) -> Plan:
    plan = make_plan()
    return replace(plan, replicas=(change(plan.replicas[0]),))


def swap_chunk(number: int, chunk: Chunk) -> Plan:
    everything = [*chunks()]
    everything[number] = chunk
    replica = make_plan().replicas[0]
    return edit(lambda _: replace(replica, pipelines=(Pipeline(tuple(everything)),)))


def swap_actions(stage: int, text: str) -> Plan:
    actions = tuple(Action.parse(word) for word in text.split())
    return edit(lambda r: replace(r, actions=(*r.actions[:stage], actions, *r.actions[stage + 1 :])))


BROKEN: list[tuple[str, Callable[[], Plan], str]] = [
    ("no stages", lambda: replace(make_plan(), stage_layers=()), "no stages"),
    ("negative layers", lambda: replace(make_plan(), stage_layers=(2, -1, 2)), "stage 1 has -1 layers"),
    ("empty sequence", lambda: replace(make_plan(), lengths=(100, 0, 20, 50)), "sequence 1 has 0 tokens"),
    ("no replicas", lambda: replace(make_plan(), replicas=()), "no replicas"),
    (
        "missing sequence",
        lambda: replace(make_plan(), lengths=(*LENGTHS, 5)),
        "sequence 4 has 5 tokens, but its slices cover 0",
    ),
    ("unknown sequence", lambda: swap_chunk(3, Chunk((Slice(9, 0, 5, 5),))), "chunk 3 names sequence 9"),
    ("wrong length", lambda: swap_chunk(3, Chunk((Slice(3, 0, 49, 49),))), "gives sequence 3 49 tokens; it has 50"),
    ("gap", lambda: swap_chunk(1, Chunk((Slice(0, 45, 70, 100), *whole(LENGTHS, [1])))), "leaves a gap"),
    ("overlap", lambda: swap_chunk(1, Chunk((Slice(0, 35, 70, 100), *whole(LENGTHS, [1])))), "overlaps"),
    ("empty chunk", lambda: swap_chunk(3, Chunk(())), "chunk 3 has no slices"),
    ("backward range", lambda: swap_chunk(3, Chunk((Slice(3, 5, 5, 50),))), "must have 0 <= start < stop"),
    (
        "two partial slices",
        lambda: swap_chunk(3, Chunk((Slice(3, 0, 20, 50), Slice(3, 20, 50, 50)))),
        "at most one such slice",
    ),
    (
        "twice",
        lambda: swap_chunk(3, Chunk((*whole(LENGTHS, [3]), *whole(LENGTHS, [1])))),
        "overlaps its earlier slices",
    ),
    ("stages of actions", lambda: edit(lambda r: replace(r, actions=r.actions[:2])), "action lists for 2 stages"),
    ("rows of recompute", lambda: edit(lambda r: replace(r, recompute=r.recompute[:2])), "recompute has 2 rows"),
    ("width of recompute", lambda: edit(lambda r: replace(r, recompute=((0,),) * 3)), "names 1 chunks"),
    (
        "too many layers",
        lambda: edit(lambda r: replace(r, recompute=((3,) * 4,) * 3)),
        "recomputes 3 layers of chunk 0",
    ),
    (
        "empty pipeline",
        lambda: edit(lambda r: replace(r, pipelines=(*r.pipelines, Pipeline(())))),
        "pipeline 2 has no chunks",
    ),
    ("unknown chunk", lambda: swap_actions(1, "F0 F1 F2 B2 B1 B0 F9"), "there are 4 chunks"),
    ("forward twice", lambda: swap_actions(1, "F0 F0"), "the chunk went forward already"),
    ("forward order", lambda: swap_actions(1, "F1 F0 F2 B2 B1 B0 F3 B3"), "slices run forward in order"),
    ("backward first", lambda: swap_actions(1, "B0"), "the activations of the chunk are not there; it comes after F0"),
    ("backward early", lambda: swap_actions(1, "F0 F1 B1 F2 B2 B0 F3 B3"), "before a later slice"),
    ("backward order", lambda: swap_actions(1, "F0 F1 F2 B1 B2 B0 F3 B3"), "before a later slice"),
    ("backward twice", lambda: swap_actions(1, "F0 F1 F2 F3 B3 B3"), "the chunk went backward already"),
    ("backward missing", lambda: swap_actions(1, "F0 F1 F2 B2 B1 B0 F3"), "never runs chunk 3 backward"),
    ("forward missing", lambda: swap_actions(1, "F0 F1 F2 B2 B1 B0"), "never runs chunk 3 forward"),
    (
        "weight gradients missing",
        lambda: swap_actions(1, "F0 F1 F2 B2 B1 B0 F3 I3"),
        "never releases the operands of weight gradients of chunk 3; W3 is missing",
    ),
    (
        "weight gradients first",
        lambda: swap_actions(1, "F0 F1 F2 W2 I2 B1 B0 F3 B3"),
        "the operands of weight gradients of the chunk are not there; it comes after I2",
    ),
    ("weight gradients of a whole backward", lambda: swap_actions(1, "F0 F1 F2 B2 W2"), "it comes after I2"),
    ("both kinds of backward", lambda: swap_actions(1, "F0 F1 F2 B2 I2"), "went backward already"),
    ("first halves out of order", lambda: swap_actions(1, "F0 F1 F2 I1 W1 I2 W2 B0 F3 B3"), "before a later slice"),
    ("a part that is not there", lambda: swap_actions(1, "F0@2"), "stage 1, action F0@2: the stage has part 1 alone"),
    ("wrong placement", lambda: _placed(((0, 2), (1,))), "names 3 parts, but stage_layers has 4"),
    ("part twice", lambda: _placed(((0, 1), (1, 2))), "must name every part from 0 on exactly once"),
    ("parts not in order", lambda: _placed(((2, 0), (1, 3))), "of stage 0; they must ascend"),
    ("stage without a part", lambda: _placed(((0, 1, 2, 3), ())), "leaves stage 1 without a part"),
    ("unnamed part", lambda: _placed(((0, 2), (1, 3)), "F0"), "the stage has the parts 0, 2; the action must name one"),
    ("other stage's part", lambda: _placed(((0, 2), (1, 3)), "F0@1"), "has the parts 0, 2"),
    (
        "handed over before it is made",
        lambda: _placed(((0, 1), (2, 3)), "F0@1 F0@0 B0@1 B0@0"),
        "waits for F0@0, which comes",
    ),
    ("replicas placed otherwise", lambda: _two_placements(), "replica 1 places parts otherwise"),
    ("crossing messages", lambda: swap_actions(1, "F3 B3 F0 F1 F2 B2 B1 B0"), "messages cross"),
    ("deadlock", lambda: _deadlocked(), "deadlock"),
]


def _placed(parts: tuple[tuple[int, ...], ...], first: str | None = None) -> Plan:
    """One chunk over two stages of two parts; ``first`` are the actions of stage 0, if they are to be others."""
    lengths = (5,)
    replica = build_replica([Pipeline((Chunk(whole(lengths, [0])),))], Placement.v_shaped(2), schedule="interleaved")
    rows = [*replica.actions]
    if first is not None:
        rows[0] = tuple(map(Action.parse, first.split()))
    if parts == ((0, 1), (2, 3)):
        rows[1] = tuple(map(Action.parse, ["F0@2", "F0@3", "B0@3", "B0@2"]))
    return Plan((1,) * 4, lengths, (replace(replica, actions=tuple(rows), placement=Placement(parts)),))


def _two_placements() -> Plan:
    lengths = (5, 6)
    replicas = [
        build_replica([Pipeline((Chunk(whole(lengths, [i])),))], placement, schedule="zero-bubble")
        for i, placement in enumerate((Placement.v_shaped(2), Placement.interleaved(2)))
    ]
    return Plan((1,) * 4, lengths, tuple(replicas))


def _deadlocked() -> Plan:
    """The first stage wants a backward before it has sent the forward that the second one runs before it."""
    lengths = (5, 6)
    pipelines = [Pipeline((Chunk(whole(lengths, [0])), Chunk(whole(lengths, [1]))))]
    replica = build_replica(pipelines, 2)
    actions = ((Forward(0), Backward(0), Forward(1), Backward(1)), (Forward(0), Forward(1), Backward(0), Backward(1)))
    return Plan((1, 1), lengths, (replace(replica, actions=actions),))


@pytest.mark.parametrize(("plan", "message"), [(p, m) for _, p, m in BROKEN], ids=[name for name, _, _ in BROKEN])
def test_each_violation_is_named(plan: Callable[[], Plan], message: str) -> None:
    make_plan().validate()
    with pytest.raises(PlanError, match=message):
        plan().validate()


def test_a_sequence_stays_in_one_replica() -> None:
    lengths = (10, 10)
    first, second = cut(0, 10, [5])
    one = build_replica([Pipeline((Chunk((first,)), Chunk(whole(lengths, [1]))))], 1)
    other = build_replica([Pipeline((Chunk((second,)),))], 1)
    with pytest.raises(PlanError, match="replicas 0 and 1"):
        Plan((1,), lengths, (one, other)).validate()


def test_a_replica_may_have_nothing_to_do() -> None:
    lengths = (10,)
    busy = build_replica([Pipeline((Chunk(whole(lengths, [0])),))], 2)
    Plan((1, 1), lengths, (busy, build_replica([], 2))).validate()


def change_json(**changes: Any) -> str:
    return json.dumps(json.loads(to_json(make_plan())) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON: it is nested too deeply"),
        ("[]", "no field 'version'"),
        (change_json(version=9), "version 9"),
        (change_json(lengths=[1.5]), "lengths must be a list of whole numbers"),
        (change_json(lengths=[1]), "names sequence"),
        (change_json(replicas={}), "replicas must be a list"),
        (change_json(replicas=[{}]), r"replicas\[0\] has no field 'pipelines'"),
        (change_json(metadata=[]), "metadata must be an object"),
        (change_json(replicas=[{"pipelines": [[[[0, 1]]]]}]), r"must be \[sequence, start, stop\]"),
        (change_json(replicas=[{"pipelines": [], "actions": [7], "recompute": []}]), "must be a text"),
        (change_json(replicas=[{"pipelines": [], "actions": ["X1"], "recompute": []}]), "action 'X1'"),
        (change_json(replicas=[{"pipelines": [], "actions": ["F" + "9" * 5000], "recompute": []}]), "action 'F999"),
        (change_json(replicas=[{"pipelines": [], "actions": ["F1@"], "recompute": []}]), "such as F12@5"),
        (change_json(placement=[]), "the placement names no stage"),
        (change_json(placement=[[0, 1.5]]), r"placement\[0\] must be a list of whole numbers"),
        (change_json(placement=[[0, 1], [3]]), "must name every part from 0 on exactly once"),
    ],
)
def test_malformed_json_is_named(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        from_json(text)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        load(tmp_path / "absent.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not a text file"):
        load(tmp_path / "binary")
