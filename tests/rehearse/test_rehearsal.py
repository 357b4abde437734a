"""Rehearsals: real processes and messages, modelled times."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinipipe.cli.main import main
from infinipipe.cost import AnalyticCost, Link, MemoryUse, PassTime
from infinipipe.cost.files import save_cost
from infinipipe.plan import (
    ONE_EACH,
    Backward,
    Chunk,
    Forward,
    Pipeline,
    Placement,
    Plan,
    PlanError,
    ReplicaPlan,
    build_replica,
    save,
    whole,
)
from infinipipe.rehearse import MAX_STAGES, rehearse
from infinipipe.runtime.pool import WorkerPool
from infinipipe.settings import SettingError
from infinipipe.simulate import simulate
from infinipipe.timeline import load
from infinipipe.verify import random_plan

STAGES = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(STAGES) as workers:
        yield workers


def make_cost(
    stages: int = STAGES,
    *,
    chunk: float = 0.0,
    token: float = 0.0,
    message: Link | None = None,
    placement: Placement | None = None,
) -> AnalyticCost:
    time = PassTime(pair=0.0, token=token, stage=chunk)
    memory = MemoryUse(layer=1, layer_kv=1, layer_input=1, kv=1, dkv=1, message=1)
    return AnalyticCost(
        stage_layers=(2,) * (placement.num_parts if placement else stages),
        placement=placement or ONE_EACH,
        forward=time,
        backward=time,
        memory=memory,
        states=(0,) * stages,
        message=message or Link(),
    )


def test_measured_is_close_to_modelled(pool: WorkerPool) -> None:
    lengths = [100] * 6
    chunks = tuple(Chunk(whole(lengths, [i])) for i in range(6))
    rows = [[1] * 6] * STAGES
    replica = build_replica([Pipeline(chunks)], STAGES, recompute=rows)
    rehearsal = rehearse(replica, lengths, make_cost(chunk=0.03, token=1e-4), pool=pool)
    forward, backward = 0.03 + 2 * 100 * 1e-4, 0.03 + 3 * 100 * 1e-4
    assert rehearsal.shortest_action == pytest.approx(forward)
    assert rehearsal.modelled_seconds == pytest.approx((6 + STAGES - 1) * (forward + backward))
    assert rehearsal.overhead >= 1.0
    assert all(
        span.seconds >= (forward if span.action.kind == "F" else backward) for span in rehearsal.timeline.spans[1]
    )


def test_messages_take_their_modelled_time(pool: WorkerPool) -> None:
    lengths = [10, 30, 10, 30]
    replica = build_replica([Pipeline(tuple(Chunk(whole(lengths, [i])) for i in range(4)))], STAGES)
    cost = make_cost(chunk=0.01, message=Link(latency=0.02, seconds_per_byte=1e-3))
    rehearsal = rehearse(replica, lengths, cost, pool=pool)
    assert rehearsal.modelled_seconds == pytest.approx(simulate(replica, cost).makespan)
    assert (
        rehearsal.modelled_seconds > 2 * rehearse(replica, lengths, make_cost(chunk=0.01), pool=pool).modelled_seconds
    )
    assert rehearsal.overhead >= 1.0


def test_speed_divides_the_waiting(pool: WorkerPool) -> None:
    lengths = [5, 5]
    replica = build_replica([Pipeline(tuple(Chunk(whole(lengths, [i])) for i in range(2)))], STAGES)
    rehearsal = rehearse(replica, lengths, make_cost(chunk=1.0), speed=100, pool=pool)
    assert rehearsal.modelled_seconds == pytest.approx(5 * 2 * 0.01)


def test_random_plans_come_to_an_end(pool: WorkerPool) -> None:
    rng = random.Random(5)
    for _ in range(5):
        lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 8))]
        plan = random_plan(rng, lengths, (2,) * STAGES)
        rehearsal = rehearse(plan.replicas[0], lengths, make_cost(message=Link(latency=1e-3)), pool=pool)
        done = [[span.action for span in row] for row in rehearsal.timeline.spans]
        assert done == [list(row) for row in plan.replicas[0].actions]


@pytest.mark.parametrize("placement", [Placement.plain(4), Placement.interleaved(4), Placement.v_shaped(2, 3)])
@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_parts_and_halves_are_rehearsed(pool: WorkerPool, placement: Placement, schedule: str) -> None:
    rng = random.Random(7)
    lengths = [rng.randint(1, 60) for _ in range(6)]
    cost = make_cost(placement.num_stages, token=1e-4, message=Link(latency=1e-3), placement=placement)
    plan = random_plan(rng, lengths, cost.stage_layers, placement=placement, schedules=[schedule])
    rehearsal = rehearse(plan.replicas[0], lengths, cost, pool=pool)
    done = [[span.action for span in row] for row in rehearsal.timeline.spans]
    assert done == [list(row) for row in plan.replicas[0].actions]
    assert rehearsal.modelled_seconds == pytest.approx(simulate(plan.replicas[0], cost).makespan)
    kinds = {span.action.kind for row in rehearsal.timeline.spans for span in row}
    assert kinds == (set("FIW") if schedule == "zero-bubble" else set("FB"))
    assert rehearsal.overhead >= 1.0


def test_a_deadlock_ends_with_an_error() -> None:
    chunks = tuple(Chunk(whole([3, 3], [i])) for i in range(2))
    actions = (
        (Forward(0), Backward(0), Forward(1), Backward(1)),
        (Forward(0), Forward(1), Backward(0), Backward(1)),
    )
    replica = ReplicaPlan((Pipeline(chunks),), actions, ((0, 0), (0, 0)))
    cost = make_cost(2)
    with pytest.raises(PlanError, match="deadlock"):
        rehearse(replica, [3, 3], cost)


def test_refusals_name_the_limit(pool: WorkerPool) -> None:
    replica = build_replica([Pipeline((Chunk(whole([3], [0])),))], STAGES)
    with pytest.raises(SettingError, match="speed must be above 0"):
        rehearse(replica, [3], make_cost(), speed=0, pool=pool)
    with pytest.raises(PlanError, match="4 stages, but the cost model describes 3"):
        rehearse(replica, [3], make_cost(3), pool=pool)
    many = build_replica([Pipeline((Chunk(whole([3], [0])),))], MAX_STAGES + 1)
    with pytest.raises(SettingError, match=f"at most {MAX_STAGES}"):
        rehearse(many, [3], make_cost(MAX_STAGES + 1))


def test_the_command_reports_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = (40, 20)
    replica = build_replica([Pipeline(tuple(Chunk(whole(lengths, [i])) for i in range(2)))], 2)
    save(Plan((2, 2), lengths, (replica,)), tmp_path / "plan.json")
    save_cost(make_cost(2, chunk=0.02), tmp_path / "cost.json")
    output = tmp_path / "rehearsed.json"
    paths = [str(tmp_path / "plan.json"), str(tmp_path / "cost.json")]
    assert main(["rehearse", *paths, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "8 actions on 2 stages came to an end" in shown
    assert "modelled 120" in shown
    assert load(output).makespan >= 0.12
    assert main(["rehearse", *paths, "--output", paths[1]]) == 2
    assert "cost.json is a file that is read; name another file" in capsys.readouterr().err
