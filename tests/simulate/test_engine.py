from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.plan import (
    COLUMNS,
    Backward,
    Channel,
    Compute,
    Forward,
    Pipeline,
    Placement,
    Plan,
    PlanError,
    Receive,
    ReplicaPlan,
    Send,
    build_replica,
)
from infinipipe.plan.types import Chunk, cut, whole
from infinipipe.simulate import Engine
from tests.simulate.cases import equal_chunks, plans

Tables = dict[str, np.ndarray]


def tables(forward: object, backward: object) -> Tables:
    """Seconds of plans whose backwards are whole."""
    return {"forward": np.asarray(forward, float), "backward": np.asarray(backward, float)}


def replay(replica: ReplicaPlan, seconds: Tables, message: np.ndarray) -> dict[tuple[int, str], tuple[float, float]]:
    """Start and end of every action by interpreting the operations themselves, in any order that works."""
    num_stages = replica.num_stages
    programs = [replica.program.operations(stage) for stage in range(num_stages)]
    position, clock = [0] * num_stages, [0.0] * num_stages
    sent: dict[tuple[Channel, int], float] = {}
    posted: dict[tuple[Channel, int], float] = {}
    handed_over: set[tuple[Channel, int]] = set()
    link_free: dict[Channel, float] = {}
    result: dict[tuple[int, str], tuple[float, float]] = {}
    for _ in range(sum(map(len, programs))):
        for stage, program in enumerate(programs):
            while position[stage] < len(program):
                operation = program[position[stage]]
                if isinstance(operation, Receive):
                    posted[operation.channel, operation.chunk] = clock[stage]
                elif isinstance(operation, Send):
                    sent[operation.channel, operation.chunk] = clock[stage]
                elif isinstance(operation, Compute):
                    action, takes = operation.action, operation.takes
                    if takes is not None and (takes, action.chunk) in posted:
                        key = takes, action.chunk
                        if key not in sent:
                            break
                        begin = max(sent[key], posted[key], link_free.get(takes, 0.0))
                        link_free[takes] = begin + message[action.chunk]
                        clock[stage] = max(clock[stage], link_free[takes])
                    elif takes is not None:
                        assert (takes, action.chunk) in handed_over
                    start = clock[stage]
                    clock[stage] += float(seconds[action.kind.row.cost][operation.part][action.chunk])
                    result[stage, str(action)] = (start, clock[stage])
                    if operation.gives is not None:
                        handed_over.add((operation.gives, action.chunk))
                position[stage] += 1
    return result


@given(plan=plans(), seed=st.integers(0, 2**32 - 1), slow_link=st.booleans())
def test_the_engine_computes_what_the_operations_mean(plan: Plan, seed: int, slow_link: bool) -> None:
    replica = plan.replicas[0]
    random = np.random.default_rng(seed)
    shape = (replica.num_parts, len(replica.chunks))
    seconds = {column: random.random(shape) for column in COLUMNS}
    recompute = random.random(shape)
    message = random.random(shape[1]) * (3.0 if slow_link else 0.1)
    with_recompute = {c: t + (recompute if c in ("backward", "backward_input") else 0.0) for c, t in seconds.items()}
    expected = replay(replica, with_recompute, message)
    engine = Engine(replica)
    times = engine.times(seconds, message, recompute)
    for stage, actions in enumerate(replica.actions):
        for i, action in enumerate(actions):
            assert (times.start[stage][i], times.end[stage][i]) == pytest.approx(expected[stage, str(action)])
    makespan = engine.makespan(seconds, message, recompute)
    assert makespan == times.makespan == max(end for _, end in expected.values())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("num_stages", "num_chunks"), [(1, 3), (2, 1), (4, 8), (4, 3), (8, 32)])
def test_equal_chunks_take_the_textbook_time(schedule: str, num_stages: int, num_chunks: int) -> None:
    replica = build_replica([Pipeline(equal_chunks(num_chunks)[1])], num_stages, schedule=schedule)
    shape = (num_stages, num_chunks)
    total = Engine(replica).makespan(tables(np.full(shape, 1.0), np.full(shape, 2.0)), np.zeros(num_chunks))
    assert total == 3 * (num_chunks + num_stages - 1)


def test_a_receive_posted_late_delays_the_transfer() -> None:
    """Stage 1 posts its third receive when it comes to the second's use, so a finished output waits until then."""
    replica = build_replica([Pipeline(equal_chunks(3)[1])], 2, schedule="gpipe")
    times = Engine(replica).times(tables([[1, 1, 1], [10, 10, 10]], np.ones((2, 3))), np.full(3, 2.0))
    assert times.posted[1][:3].tolist() == [0, 0, 13]
    assert times.transfer[1][:3].tolist() == [1, 3, 13]
    assert times.arrival[1][:3].tolist() == [3, 5, 15]
    assert times.start[1][:3].tolist() == [3, 13, 23]


def test_a_link_carries_one_message_at_a_time_per_direction() -> None:
    replica = build_replica([Pipeline(equal_chunks(2)[1])], 2, schedule="gpipe")
    times = Engine(replica).times(tables(np.ones((2, 2)), np.ones((2, 2))), np.full(2, 5.0))
    assert times.transfer[1][:2].tolist() == [1, 6]
    assert times.arrival[1][:2].tolist() == [6, 11]


def test_an_empty_replica_takes_no_time() -> None:
    replica = build_replica([], 3)
    assert Engine(replica).makespan({}, np.zeros(0)) == 0


def test_deadlocks_and_crossed_messages_are_refused() -> None:
    replica = build_replica([Pipeline(equal_chunks(2)[1])], 2)
    waits_for_itself = (
        (Forward(0), Backward(0), Forward(1), Backward(1)),
        (Forward(0), Forward(1), Backward(0), Backward(1)),
    )
    with pytest.raises(PlanError, match="deadlock"):
        Engine(replace(replica, actions=waits_for_itself))
    crossed = ((Forward(0), Forward(1), Backward(0), Backward(1)), (Forward(1), Forward(0), Backward(0), Backward(1)))
    with pytest.raises(PlanError, match="cross"):
        Engine(replace(replica, actions=crossed))


HALVES = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}


def unit_seconds(replica: ReplicaPlan) -> Tables:
    """A unit for a forward and for each half of a backward, of a chunk at a stage; its parts share them."""
    share = replica.num_stages / replica.num_parts
    return {column: np.full((replica.num_parts, len(replica.chunks)), s * share) for column, s in HALVES.items()}


def busy_from_to(replica: ReplicaPlan) -> tuple[float, list[float]]:
    """The makespan, and every stage's idle time between its first and its last action."""
    times = Engine(replica).times(unit_seconds(replica), np.zeros(len(replica.chunks)))
    idle = [float(end[-1] - start[0] - (end - start).sum()) for start, end in zip(times.start, times.end, strict=True)]
    return times.makespan, idle


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
def test_known_bubbles_of_zero_bubble_schedules(num_stages: int) -> None:
    """Table 2 of arXiv 2401.10241, for F = B = W: (p - 1)(F + B + W), (p - 1)(F + B - W) and, with twice the chunks in flight, 0.

    The last is counted as there: idle between a stage's first and last action. ZB-V (2405.15362) has no more than 1F1B's memory.
    """
    chunks = equal_chunks(4 * num_stages)[1]
    count, p = len(chunks), num_stages

    def makespan(stages: int | Placement, schedule: str, warmup: list[int] | None = None) -> tuple[float, list[float]]:
        return busy_from_to(build_replica([Pipeline(chunks)], stages, schedule=schedule, warmup=warmup))

    assert makespan(p, "1f1b")[0] == 3 * count + 3 * (p - 1)
    assert makespan(p, "interleaved")[0] == 3 * count + 3 * (p - 1)
    assert makespan(p, "zero-bubble")[0] == 3 * count + (p - 1)
    ahead = makespan(p, "zero-bubble", [2 * (p - 1 - stage) for stage in range(p)])
    assert ahead[0] == 3 * count + (p - 1)
    assert max(ahead[1]) == 0
    v_shaped = makespan(Placement.v_shaped(p), "zero-bubble")
    assert v_shaped[0] <= 3 * count + (p - 1)
    assert makespan(Placement.interleaved(p), "interleaved")[0] < 3 * count + 3 * (p - 1)


@pytest.mark.parametrize(
    ("units", "bubble"),
    [([4, 1, 2, 1], 0.5714), ([2, 2, 2, 2], 0.4286)],
    ids=["unequal", "equal"],
)
def test_the_published_bubble_of_four_stages(units: list[int], bubble: float) -> None:
    """1F1B over sequences of so many units, one a chunk, a backward twice the forward (method, section 1)."""
    replica = build_replica([Pipeline(tuple(Chunk(whole(units, [i])) for i in range(4)))], 4)
    forward = np.tile(np.array(units, float), (4, 1))
    seconds = tables(forward, 2 * forward)
    total = Engine(replica).makespan(seconds, np.zeros(4))
    assert 1 - 3 * sum(units) / total == pytest.approx(bubble, abs=5e-5)


def test_parts_of_one_stage_hand_over_without_a_message() -> None:
    """Of a v-shaped placement over two stages, parts 1 and 2 are neighbours on stage 1: one message there, one back."""
    replica = build_replica([Pipeline(equal_chunks(1)[1])], Placement.v_shaped(2), schedule="interleaved")
    total = Engine(replica).makespan(tables(np.ones((4, 1)), np.ones((4, 1))), np.array([10.0]))
    assert total == 8 + 4 * 10
    alone = build_replica([Pipeline(equal_chunks(1)[1])], Placement(((0, 1, 2, 3),)), schedule="interleaved")
    assert Engine(alone).makespan(tables(np.ones((4, 1)), np.ones((4, 1))), np.array([10.0])) == 8


def test_a_channel_is_no_part_of_another() -> None:
    """Interleaved over two stages, borders 0 and 2 both lead from stage 0 to stage 1: neither waits for the other."""
    lengths = (4, 4)
    chunks = (*(Chunk((piece,)) for piece in cut(0, 4, [2])), Chunk(whole(lengths, [1])))
    replica = build_replica([Pipeline(chunks)], Placement.interleaved(2), schedule="interleaved")
    channels = {channel for channel, _, _ in replica.program.links}
    assert len(channels) == 6


def test_eight_stages_of_two_thousand_chunks_take_a_tenth_of_a_second() -> None:
    replica = build_replica([Pipeline(equal_chunks(2000)[1])], 8)
    engine = Engine(replica)
    forward, message = np.ones((8, 2000)), np.zeros(2000)
    seconds = []
    for _ in range(5):
        before = time.process_time()
        engine.makespan(tables(forward, forward), message)
        seconds.append(time.process_time() - before)
    assert min(seconds) < 0.1
