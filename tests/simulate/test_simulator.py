from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.plan import Chunk, Direction, Pipeline, Plan, PlanError, build_replica, cut, whole
from infinipipe.plan.types import ActionKind
from infinipipe.planner.memory import replica_peaks
from infinipipe.simulate import Simulation, simulate, simulate_plan
from infinipipe.timeline import Span
from tests.simulate.cases import RoundCost, equal_chunks, plans


@dataclass(frozen=True)
class FreeMessages(RoundCost):
    """Messages that take no time."""

    def message_seconds(self, num_tokens: int) -> float:
        return 0.0


@dataclass(frozen=True)
class BareCost(RoundCost):
    """Little memory beside that of messages."""

    transient: int = 0

    def activation_bytes(self, chunk: Chunk, stage: int, layers: int) -> int:
        return chunk.num_tokens * (1 + self.stage_layers[stage] - layers)

    def forward_transient_bytes(self, chunk: Chunk, stage: int, layers: int) -> int:
        return self.transient * chunk.num_tokens

    def backward_transient_bytes(self, chunk: Chunk, stage: int, layers: int) -> int:
        return self.transient * chunk.num_tokens


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("num_stages", "num_chunks"), [(1, 3), (2, 1), (2, 5), (4, 4), (4, 8), (8, 32)])
def test_equal_chunks_have_the_textbook_bubble(schedule: str, num_stages: int, num_chunks: int) -> None:
    replica = build_replica([Pipeline(equal_chunks(num_chunks)[1])], num_stages, schedule=schedule)
    simulation = simulate(replica, FreeMessages((1,) * num_stages))
    expected = (num_stages - 1) / (num_chunks + num_stages - 1)
    assert simulation.bubble_fraction == pytest.approx(expected)
    for stage in simulation.stages:
        assert stage.bubble / simulation.makespan == pytest.approx(expected)
        assert stage.steady_bubble == pytest.approx(0)
        assert stage.communication == 0


def test_warmup_and_cooldown_bubbles_of_1f1b() -> None:
    """Of forward 2 and backward 4 seconds on three stages: stage p waits 2p for its first forward, then for backwards."""
    replica = build_replica([Pipeline(equal_chunks(6)[1])], 3)
    cost = FreeMessages((1, 1, 1))
    forward = cost.pass_seconds("forward", replica.chunks[0], 0)
    stages = simulate(replica, cost).stages
    assert [s.warmup_bubble for s in stages] == pytest.approx([4 * forward, 2 * forward + forward, 2 * forward])
    assert [s.cooldown_bubble for s in stages] == pytest.approx([2 * forward, 3 * forward, 4 * forward])


def test_one_chunk_on_two_stages_by_hand() -> None:
    """Forward 2.5, message 0.3125, backward 5, and 2.5 for recomputing one of one layer on stage 0."""
    _, chunks = equal_chunks(1)
    replica = build_replica([Pipeline(chunks)], 2, recompute=[[1], [0]])
    cost = RoundCost((1, 1))
    forward = 1 + 8 * 9 / 64
    message = 0.25 + 8 / 128
    simulation = simulate(replica, cost)
    assert simulation.makespan == pytest.approx(6 * forward + 2 * message + forward)
    first, second = simulation.stages
    assert first.recompute == pytest.approx(forward)
    assert second.recompute == 0
    assert (first.forward, first.backward) == pytest.approx((forward, 2 * forward))
    assert first.communication == pytest.approx(message)
    assert second.communication == pytest.approx(message)
    assert second.warmup_bubble == pytest.approx(forward)
    assert second.cooldown_bubble == pytest.approx(message + 3 * forward)


def test_memory_of_a_cut_sequence_by_hand() -> None:
    """Two slices of 4 tokens on one stage of two layers, the first with one layer recomputed."""
    replica = build_replica([Pipeline(tuple(Chunk((piece,)) for piece in cut(0, 8, [4])))], 1, recompute=[[1, 0]])
    simulation = simulate(replica, RoundCost((2,)))
    states, store, gradients = 1000, 2 * 8 * 2, 4 * 4 * 2
    first, second = 4 * (10 + 1), 4 * 20
    f0, f1, b1, b0 = simulation.timeline.spans[0]
    held = [
        (f0.start, states + store + first + 12),
        (f1.start, states + store + first + second + 12),
        (b1.start, states + store + first + second + gradients + 20),
        (b0.start, states + store + first + gradients + 20),
        (b0.end, states),
    ]
    assert list(simulation.timeline.memory[0]) == held
    assert simulation.peaks == (states + store + first + second + gradients + 20,)


@given(plan=plans())
def test_memory_is_what_lives_at_each_moment(plan: Plan) -> None:
    """At the middle of every action, the curve is the sum of all that lives then, found anew for that moment."""
    replica, cost = plan.replicas[0], RoundCost(plan.stage_layers)
    simulation = simulate(replica, cost)
    for stage, row in enumerate(simulation.timeline.spans):
        curve = simulation.timeline.memory[stage]
        for span in row:
            moment = (span.start + span.end) / 2
            seen = [size for seconds, size in curve if seconds <= moment][-1]
            assert seen == _living(simulation, cost, plan, stage, moment)
        assert curve[-1][1] == cost.state_bytes(stage)
        assert simulation.peaks[stage] >= max(size for _, size in curve)


def _living(simulation: Simulation, cost: RoundCost, plan: Plan, stage: int, moment: float) -> int:
    timeline, replica = simulation.timeline, plan.replicas[0]
    spans = timeline.spans[stage]
    forward = {s.action.chunk: s for s in spans if s.action.kind is ActionKind.FORWARD}
    backward = {s.action.chunk: s for s in spans if s.action.kind is ActionKind.BACKWARD}
    total = cost.state_bytes(stage)
    slices: dict[int, list[int]] = {}
    for index, chunk in enumerate(timeline.chunks):
        layers = replica.recompute[stage][index]
        if forward[index].start <= moment < backward[index].end:
            total += cost.activation_bytes(chunk, stage, layers)
        if _runs(forward[index], moment):
            total += cost.transient_bytes("forward", chunk, stage, layers)
        if _runs(backward[index], moment):
            total += cost.transient_bytes("backward", chunk, stage, layers)
        if chunk.partial is not None:
            slices.setdefault(chunk.partial.sequence, []).append(index)
    for sequence, indices in slices.items():
        last_start = timeline.chunks[indices[-1]].slices[0].start
        if forward[indices[0]].start <= moment < backward[indices[0]].end:
            total += cost.kv_bytes(plan.lengths[sequence], stage)
        if backward[indices[-1]].start <= moment < backward[indices[0]].end:
            total += cost.dkv_bytes(last_start, stage)
    return total + _buffers(simulation, cost, stage, moment)


def _runs(span: Span, moment: float) -> bool:
    return span.start <= moment < span.end


def _buffers(simulation: Simulation, cost: RoundCost, stage: int, moment: float) -> int:
    timeline = simulation.timeline
    total = 0
    previous_use = dict.fromkeys(Direction, 0.0)
    starts = [0.0, *(span.start for span in timeline.spans[stage])]
    ends = [0.0, *(span.end for span in timeline.spans[stage])]
    seen = dict.fromkeys(Direction, 0)
    sent = {(m.source, m.direction, m.chunk): m for m in timeline.messages}
    for position, span in enumerate(timeline.spans[stage]):
        is_forward = span.action.kind is ActionKind.FORWARD
        direction = Direction.FORWARD if is_forward else Direction.BACKWARD
        size = cost.message_bytes(timeline.chunks[span.action.chunk].num_tokens)
        if (stage + (-1 if is_forward else 1), direction, span.action.chunk) in sent:
            posted = previous_use[direction] if seen[direction] else ends[max(position - 1, 0)]
            if posted <= moment < (starts[position + 1] if is_forward else span.end):
                total += size
            seen[direction] += 1
            previous_use[direction] = ends[position]
        message = sent.get((stage, direction, span.action.chunk))
        if message is not None and span.end <= moment < message.end:
            total += size
    return total


@given(plan=plans())
def test_properties_of_any_simulation(plan: Plan) -> None:
    replica, cost = plan.replicas[0], RoundCost(plan.stage_layers)
    simulation = simulate(replica, cost)
    assert simulation == simulate(replica, cost), "simulation is deterministic"
    timeline = simulation.timeline
    computed = {(stage, span.action): span for stage, row in enumerate(timeline.spans) for span in row}
    for row in timeline.spans:
        for before, after in itertools.pairwise(row):
            assert before.end <= after.start
        assert sum(span.seconds for span in row) <= timeline.makespan * (1 + 1e-12)
    for message in timeline.messages:
        kind = ActionKind.FORWARD if message.direction == Direction.FORWARD else ActionKind.BACKWARD
        produced = next(
            s for s in timeline.spans[message.source] if s.action.kind is kind and s.action.chunk == message.chunk
        )
        used = computed[message.target, produced.action]
        assert produced.end <= message.ready <= message.start <= message.end <= used.start
    for index, chunk in enumerate(replica.chunks):
        path = sum(
            cost.pass_seconds("forward", chunk, stage)
            + cost.pass_seconds("backward", chunk, stage)
            + cost.recompute_seconds(chunk, stage, replica.recompute[stage][index])
            for stage in range(plan.num_stages)
        )
        path += 2 * (plan.num_stages - 1) * cost.message_seconds(chunk.num_tokens)
        assert path <= timeline.makespan * (1 + 1e-12), "every chunk goes through all stages and back"
    for stage in simulation.stages:
        assert stage.total == pytest.approx(timeline.makespan)
        assert min(stage.communication, stage.warmup_bubble, stage.steady_bubble, stage.cooldown_bubble) >= -1e-9


@given(plan=plans())
def test_links_carry_one_message_at_a_time(plan: Plan) -> None:
    simulation = simulate(plan.replicas[0], RoundCost(plan.stage_layers, message_latency=5.0))
    links: dict[tuple[int, Direction], float] = {}
    for message in simulation.timeline.messages:
        link = (message.source, message.direction)
        assert message.start >= links.get(link, 0.0)
        links[link] = message.end


@given(plan=plans(), latency=st.sampled_from([0.0, 0.25, 5.0, 200.0]), transient=st.integers(0, 3))
def test_the_planner_promises_no_less_memory_than_the_simulation_uses(
    plan: Plan, latency: float, transient: int
) -> None:
    """However slow the links are, and however little an action needs while it runs."""
    cost = BareCost(plan.stage_layers, message_latency=latency, transient=transient)
    promised = replica_peaks(plan.replicas[0], cost)
    for used, most in zip(simulate(plan.replicas[0], cost).peaks, promised, strict=True):
        assert used <= most


def test_replicas_are_simulated_apart_and_may_be_empty() -> None:
    lengths, chunks = equal_chunks(3)
    replicas = (build_replica([Pipeline(chunks)], 2), build_replica([], 2))
    busy, idle = simulate_plan(Plan((1, 1), tuple(lengths), replicas), RoundCost((1, 1)), budget=5000)
    assert busy.timeline.budget == 5000
    assert busy.makespan > 0
    assert idle.makespan == 0
    assert idle.peaks == (1000, 2000)
    assert idle.bubble_fraction == 0


def test_a_cost_model_of_other_stages_is_refused() -> None:
    lengths, chunks = equal_chunks(1)
    replica = build_replica([Pipeline(chunks)], 2)
    with pytest.raises(PlanError, match="2 stages, but the cost model describes 3"):
        simulate(replica, RoundCost((1, 1, 1)))
    with pytest.raises(PlanError, match="cost model of"):
        simulate_plan(Plan((1, 1), tuple(lengths), (replica,)), RoundCost((2, 1)))


def test_two_thousand_chunks_on_eight_stages_take_less_than_a_second() -> None:
    lengths = [8] * 2000
    pipeline = Pipeline(tuple(Chunk(whole(lengths, [i])) for i in range(2000)))
    replica = build_replica([pipeline], 8)
    seconds = []
    for _ in range(2):
        before = time.process_time()
        simulate(replica, RoundCost((4,) * 8))
        seconds.append(time.process_time() - before)
    assert min(seconds) < 1.0
