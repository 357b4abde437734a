from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.plan import (
    Backward,
    Compute,
    Direction,
    Forward,
    Pipeline,
    Plan,
    PlanError,
    Receive,
    ReplicaPlan,
    Send,
    build_replica,
    operations,
    receives_input,
)
from infinipipe.plan.types import ActionKind
from infinipipe.simulate import Engine, makespan
from tests.simulate.cases import equal_chunks, plans


def replay(
    replica: ReplicaPlan, seconds: dict[ActionKind, np.ndarray], message: np.ndarray
) -> dict[tuple[int, str], tuple[float, float]]:
    """Start and end of every action by interpreting the operations themselves, in any order that works."""
    num_stages = replica.num_stages
    programs = [operations(replica, stage) for stage in range(num_stages)]
    position, clock = [0] * num_stages, [0.0] * num_stages
    sent: dict[tuple[int, Direction, int], float] = {}
    posted: dict[tuple[int, Direction, int], float] = {}
    link_free: dict[tuple[int, Direction], float] = {}
    result: dict[tuple[int, str], tuple[float, float]] = {}
    for _ in range(sum(map(len, programs))):
        for stage, program in enumerate(programs):
            while position[stage] < len(program):
                operation = program[position[stage]]
                if isinstance(operation, Receive):
                    posted[stage, operation.direction, operation.chunk] = clock[stage]
                elif isinstance(operation, Send):
                    sent[stage, operation.direction, operation.chunk] = clock[stage]
                elif isinstance(operation, Compute):
                    action = operation.action
                    direction = receives_input(action, stage, num_stages)
                    if direction is not None:
                        source = stage - 1 if direction == Direction.FORWARD else stage + 1
                        key = (source, direction, action.chunk)
                        if key not in sent:
                            break
                        begin = max(sent[key], posted[stage, direction, action.chunk])
                        begin = max(begin, link_free.get((source, direction), 0.0))
                        link_free[source, direction] = begin + message[action.chunk]
                        clock[stage] = max(clock[stage], link_free[source, direction])
                    start = clock[stage]
                    clock[stage] += float(seconds[action.kind][stage][action.chunk])
                    result[stage, str(action)] = (start, clock[stage])
                position[stage] += 1
    return result


@given(plan=plans(), seed=st.integers(0, 2**32 - 1), slow_link=st.booleans())
def test_the_engine_computes_what_the_operations_mean(plan: Plan, seed: int, slow_link: bool) -> None:
    replica = plan.replicas[0]
    random = np.random.default_rng(seed)
    shape = (replica.num_stages, len(replica.chunks))
    forward, backward = random.random(shape), 2 * random.random(shape)
    message = random.random(shape[1]) * (3.0 if slow_link else 0.1)
    expected = replay(replica, {ActionKind.FORWARD: forward, ActionKind.BACKWARD: backward}, message)
    times = Engine(replica).times(forward, backward, message)
    for stage, actions in enumerate(replica.actions):
        for i, action in enumerate(actions):
            assert (times.start[stage][i], times.end[stage][i]) == pytest.approx(expected[stage, str(action)])
    assert makespan(replica, forward, backward, message) == times.makespan == max(end for _, end in expected.values())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("num_stages", "num_chunks"), [(1, 3), (2, 1), (4, 8), (4, 3), (8, 32)])
def test_equal_chunks_take_the_textbook_time(schedule: str, num_stages: int, num_chunks: int) -> None:
    replica = build_replica([Pipeline(equal_chunks(num_chunks)[1])], num_stages, schedule=schedule)
    shape = (num_stages, num_chunks)
    total = makespan(replica, np.full(shape, 1.0), np.full(shape, 2.0), np.zeros(num_chunks))
    assert total == 3 * (num_chunks + num_stages - 1)


def test_a_receive_posted_late_delays_the_transfer() -> None:
    """Stage 1 posts its third receive when it comes to the second's use, so a finished output waits until then."""
    replica = build_replica([Pipeline(equal_chunks(3)[1])], 2, schedule="gpipe")
    times = Engine(replica).times([[1, 1, 1], [10, 10, 10]], np.ones((2, 3)), np.full(3, 2.0))
    assert times.posted[1][:3].tolist() == [0, 0, 13]
    assert times.transfer[1][:3].tolist() == [1, 3, 13]
    assert times.arrival[1][:3].tolist() == [3, 5, 15]
    assert times.start[1][:3].tolist() == [3, 13, 23]


def test_a_link_carries_one_message_at_a_time_per_direction() -> None:
    replica = build_replica([Pipeline(equal_chunks(2)[1])], 2, schedule="gpipe")
    times = Engine(replica).times(np.ones((2, 2)), np.ones((2, 2)), np.full(2, 5.0))
    assert times.transfer[1][:2].tolist() == [1, 6]
    assert times.arrival[1][:2].tolist() == [6, 11]


def test_an_empty_replica_takes_no_time() -> None:
    replica = build_replica([], 3)
    assert makespan(replica, np.zeros((3, 0)), np.zeros((3, 0)), np.zeros(0)) == 0


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


def test_eight_stages_of_two_thousand_chunks_take_a_tenth_of_a_second() -> None:
    replica = build_replica([Pipeline(equal_chunks(2000)[1])], 8)
    engine = Engine(replica)
    forward, message = np.ones((8, 2000)), np.zeros(2000)
    seconds = []
    for _ in range(5):
        before = time.process_time()
        engine.makespan(forward, forward, message)
        seconds.append(time.process_time() - before)
    assert min(seconds) < 0.1
