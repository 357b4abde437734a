from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.plan import Channel, Chunk, Direction, Pipeline, Placement, Plan, PlanError, build_replica, cut, whole
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

    def activation_bytes(self, chunk: Chunk, part: int, layers: int) -> int:
        return chunk.num_tokens * (1 + self.stage_layers[part] - layers)

    def weight_operand_bytes(self, chunk: Chunk, part: int) -> int:
        return chunk.num_tokens

    def transient_bytes(self, column: str, chunk: Chunk, part: int, layers: int) -> int:
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
    replica = plan.replicas[0]
    cost = RoundCost(plan.stage_layers, placed=plan.placement)
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
    total = cost.state_bytes(stage)
    for part in plan.placement.parts[stage]:
        total += _living_at(simulation, cost, plan, stage, part, moment)
    return total + _buffers(simulation, cost, stage, moment)


def _spans(simulation: Simulation, stage: int, part: int, letters: str) -> dict[int, Span]:
    """The spans of a part by chunk, of the kinds with those letters."""
    timeline = simulation.timeline
    return {
        span.action.chunk: span
        for span in timeline.spans[stage]
        if timeline.part(stage, span.action) == part and span.action.kind.value in letters
    }


def _living_at(simulation: Simulation, cost: RoundCost, plan: Plan, stage: int, part: int, moment: float) -> int:
    timeline, recompute = simulation.timeline, plan.replicas[0].recompute[part]
    forward, backward, weight = (_spans(simulation, stage, part, letters) for letters in ("F", "BI", "W"))
    total = 0
    slices: dict[int, list[int]] = {}
    for index, chunk in enumerate(timeline.chunks):
        layers = recompute[index]
        if forward[index].start <= moment < backward[index].end:
            total += cost.activation_bytes(chunk, part, layers)
        if index in weight and backward[index].end <= moment < weight[index].end:
            total += cost.weight_operand_bytes(chunk, part)
        for column, spans in (("forward", forward), ("backward", backward), ("backward_weight", weight)):
            if index in spans and _runs(spans[index], moment):
                column = spans[index].action.kind.row.cost
                total += cost.transient_bytes(column, chunk, part, layers)
        if chunk.partial is not None:
            slices.setdefault(chunk.partial.sequence, []).append(index)
    for sequence, indices in slices.items():
        last_start = timeline.chunks[indices[-1]].slices[0].start
        if forward[indices[0]].start <= moment < backward[indices[0]].end:
            total += cost.kv_bytes(plan.lengths[sequence], part)
        if backward[indices[-1]].start <= moment < backward[indices[0]].end:
            total += cost.dkv_bytes(last_start, part)
    return total


def _runs(span: Span, moment: float) -> bool:
    return span.start <= moment < span.end


def _buffers(simulation: Simulation, cost: RoundCost, stage: int, moment: float) -> int:
    """Messages at both their ends, and what the stage's parts have handed over to each other."""
    timeline = simulation.timeline
    makes, _ = timeline.messages_at
    total = 0
    previous_use: dict[Channel, float] = {}
    ends = [0.0, *(span.end for span in timeline.spans[stage])]
    sent = {(m.channel, m.chunk): m for m in timeline.messages}
    stage_of = timeline.placement.stage_of
    for position, span in enumerate(timeline.spans[stage]):
        flow, part = span.action.kind.row.flow, timeline.part(stage, span.action)
        if flow is None:
            continue
        size = cost.message_bytes(timeline.chunks[span.action.chunk].num_tokens)
        is_forward = flow is Direction.FORWARD
        given = Channel(part if is_forward else part - 1, flow)
        taken = Channel(part - 1 if is_forward else part, flow)
        until = span.start if is_forward else span.end
        if (taken, span.action.chunk) in sent:
            posted = previous_use.get(taken, ends[max(position - 1, 0)])
            total += size * (posted <= moment < until)
            previous_use[taken] = ends[position]
        elif (taken, span.action.chunk) in makes and stage_of[taken.source] == stage:
            total += size * (makes[taken, span.action.chunk].end <= moment < until)
        message = sent.get((given, span.action.chunk))
        if message is not None:
            total += size * (span.end <= moment < message.end)
    return total


@given(plan=plans())
def test_properties_of_any_simulation(plan: Plan) -> None:
    replica, cost = plan.replicas[0], RoundCost(plan.stage_layers, placed=plan.placement)
    simulation = simulate(replica, cost)
    assert simulation == simulate(replica, cost), "simulation is deterministic"
    timeline = simulation.timeline
    for row in timeline.spans:
        for before, after in itertools.pairwise(row):
            assert before.end <= after.start
        assert sum(span.seconds for span in row) <= timeline.makespan * (1 + 1e-12)
    makes, takes = timeline.messages_at
    for message in timeline.messages:
        produced, used = makes[message.channel, message.chunk], takes[message.channel, message.chunk]
        assert produced in timeline.spans[message.source]
        assert used in timeline.spans[message.target]
        assert produced.end <= message.ready <= message.start <= message.end <= used.start
    stage_of = plan.placement.stage_of
    between = sum(a != b for a, b in itertools.pairwise(stage_of))
    assert len(timeline.messages) == 2 * between * len(replica.chunks)
    for index, chunk in enumerate(replica.chunks):
        columns = {span.action.kind.row.cost for row in timeline.spans for span in row if span.action.chunk == index}
        path = sum(
            sum(cost.pass_seconds(column, chunk, part) for column in columns - {"backward_weight"})
            + cost.recompute_seconds(chunk, part, replica.recompute[part][index])
            for part in range(plan.num_parts)
        )
        path += 2 * between * cost.message_seconds(chunk.num_tokens)
        assert path <= timeline.makespan * (1 + 1e-12), "every chunk goes through all parts and back"
    for stage in simulation.stages:
        assert stage.total == pytest.approx(timeline.makespan)
        assert min(stage.communication, stage.warmup_bubble, stage.steady_bubble, stage.cooldown_bubble) >= -1e-9


@given(plan=plans())
def test_channels_carry_one_message_at_a_time(plan: Plan) -> None:
    cost = RoundCost(plan.stage_layers, message_latency=5.0, placed=plan.placement)
    free: dict[Channel, float] = {}
    for message in simulate(plan.replicas[0], cost).timeline.messages:
        assert message.start >= free.get(message.channel, 0.0)
        free[message.channel] = message.end


@given(plan=plans(), latency=st.sampled_from([0.0, 0.25, 5.0, 200.0]), transient=st.integers(0, 3))
def test_the_planner_promises_no_less_memory_than_the_simulation_uses(
    plan: Plan, latency: float, transient: int
) -> None:
    """However slow the links are, and however little an action needs while it runs."""
    cost = BareCost(plan.stage_layers, message_latency=latency, transient=transient, placed=plan.placement)
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
    v, interleaved = Placement.v_shaped(2), Placement.interleaved(2)
    with pytest.raises(
        PlanError, match=r"places the parts \[\[0, 3\], \[1, 2\]\] on its stages, the cost model \[\[0, 2\], \[1, 3\]\]"
    ):
        simulate(build_replica([Pipeline(chunks)], v, schedule="interleaved"), RoundCost((1,) * 4, placed=interleaved))


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
