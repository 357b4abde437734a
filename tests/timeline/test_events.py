from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infinipipe.cost import Link, ModelShape, flop_cost
from infinipipe.plan import Chunk, Pipeline, Placement, ReplicaPlan, build_replica, cut, whole
from infinipipe.simulate import Simulation, simulate
from infinipipe.timeline import Source, Timeline, TimelineError, breakdown, from_json, load, save, to_json
from infinipipe.timeline.figure import draw
from infinipipe.timeline.page import html_page
from infinipipe.timeline.svg import to_svg
from infinipipe.timeline.trace import chrome_trace


def test_timelines_survive_json(simulated: Timeline, measured: Timeline, tmp_path: Path) -> None:
    for timeline in (simulated, measured):
        assert from_json(to_json(timeline)) == timeline
        save(timeline, tmp_path / "step.json")
        assert load(tmp_path / "step.json") == timeline
    assert list(tmp_path.iterdir()) == [tmp_path / "step.json"]


def test_a_measured_step_starts_at_zero(measured: Timeline, simulated: Timeline) -> None:
    assert measured.source == Source.MEASURED
    assert min(row[0].start for row in measured.spans) == 0
    assert 1.0 < measured.makespan / simulated.makespan < 1.1
    assert [s.layers for s in measured.spans[0] if str(s.action) in ("F0", "B0")] == [0, 2]


def test_parts_of_a_stage_add_up(simulation: Simulation, measured: Timeline) -> None:
    for timeline in (simulation.timeline, measured):
        for stage in breakdown(timeline):
            assert stage.total == pytest.approx(timeline.makespan)
    assert all(stage.communication == 0 for stage in breakdown(measured))
    assert simulation.stages[1].communication > 0
    assert simulation.stages[0].recompute > 0


def test_halves_of_backwards_and_parts_are_told_apart(tmp_path: Path) -> None:
    lengths = [40, 30]
    chunks = (*(Chunk((piece,)) for piece in cut(0, 40, [20])), Chunk(whole(lengths, [1])))
    replica = build_replica([Pipeline(chunks)], Placement.v_shaped(2), schedule="zero-bubble")
    shape = ModelShape(layers=8, hidden=64, intermediate=176, heads=4, kv_heads=2, head_dim=16, vocab=100)
    link = Link(latency=2e-3)
    cost = flop_cost(shape, (2, 2, 2, 2), flops_per_second=1e9, message=link, placement=Placement.v_shaped(2))
    simulation = simulate(replica, cost)
    timeline = simulation.timeline
    assert from_json(to_json(timeline)) == timeline
    assert all(stage.weight > 0 for stage in simulation.stages)
    assert all(stage.total == pytest.approx(timeline.makespan) for stage in simulation.stages)
    assert {(m.source, m.target, m.border) for m in timeline.messages} == {(0, 1, 0), (1, 0, 2), (0, 1, 2), (1, 0, 0)}
    svg, trace = to_svg(draw([timeline])), json.loads(chrome_trace([timeline]))["traceEvents"]
    assert "backward of the weights of chunk 0 on stage 0, part 3" in svg
    assert {event["cat"] for event in trace if event["ph"] == "X"} == {
        "forward",
        "backward of the input",
        "backward of the weights",
    }
    assert sum(event["ph"] == "s" for event in trace) == len(timeline.messages)
    assert '"W":"backward of the weights"' in html_page([timeline])


def test_without_messages_communication_is_bubble(simulation: Simulation) -> None:
    blind = breakdown(replace(simulation.timeline, messages=()))
    for stage, without in zip(simulation.stages, blind, strict=True):
        assert without.bubble == pytest.approx(stage.bubble + stage.communication)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "not a timeline"),
        ({"version": 9}, "version 9"),
        ({"source": "guessed"}, "field 'source' must be 'simulated' or 'measured'"),
        ({"budget": float("inf")}, "field 'budget' must be a number of bytes or null"),
        ({"budget": []}, "field 'budget' must be a number of bytes or null"),
        ({"pipelines": None}, "field 'pipelines' must be a list of pipelines"),
        ({"pipelines": [[[[0, 4]]]]}, "field 'pipelines' must be a list of pipelines"),
        ({"spans": 3}, "field 'spans' must be a list, for every stage, of .action, start, end"),
        (
            {"spans": [[["F0", 0.0, "x", 0.0, 0]], []]},
            "field 'spans' must be a list, for every stage, of .action, start, end",
        ),
        ({"spans": [[["Z0", 0.0, 1.0, 0.0, 0]], []]}, "field 'spans' is malformed: action 'Z0' is not"),
        ({"messages": [[0, 1, 0, "up", 0, 0.0, 0.0, 0.0]]}, "field 'messages' must be a list of .source stage"),
        ({"messages": [[1, 0, 0, "forward", 0, 0.0, 0.0, 0.0]]}, "do not both run it"),
        ({"placement": [[0], [2]]}, "must name every part from 0 on exactly once"),
        ({"placement": [[0]]}, "the timeline has 2 stages, but its placement 1"),
        ({"spans": [[["F0@1", 0.0, 1.0, 0.0, 0]], []], "messages": []}, "runs F0@1, but it does not have that part"),
        ({"messages": [{}]}, "field 'messages' must be a list of .source stage"),
        ({"memory": [[0.0, 1], []]}, "field 'memory' must be a list, for every stage, of .seconds, bytes."),
        ({"spans": [[["F99", 0.0, 1.0, 0.0, 0]], []], "messages": []}, "there are 9 chunks"),
        (
            {"spans": [[["F0", 0.0, 2.0, 0.0, 0], ["F1", 1.0, 3.0, 0.0, 0]], []], "messages": []},
            "times of F1 are out of order",
        ),
        ({"spans": [[["F0", 0.0, float("inf"), 0.0, 0]], []], "messages": []}, "times of F0 are out of order"),
        ({"spans": [[], []]}, "do not both run it"),
        ({"memory": [[]]}, "2 stages but 1 memory"),
        ({"pipelines": [[[]] * 9]}, "chunk without slices"),
    ],
)
def test_broken_timelines_are_refused(simulated: Timeline, change: dict[str, Any], words: str) -> None:
    with pytest.raises(TimelineError, match=words):
        from_json(json.dumps(json.loads(to_json(simulated)) | change))


def test_a_missing_field_is_named(simulated: Timeline) -> None:
    data = json.loads(to_json(simulated))
    for name in data.keys() - {"format", "version"}:
        with pytest.raises(TimelineError, match=f"the timeline has no field '{name}'"):
            from_json(json.dumps({key: value for key, value in data.items() if key != name}))


def test_errors_name_the_file(tmp_path: Path, simulated: Timeline) -> None:
    with pytest.raises(TimelineError, match=r"missing\.json: No such file"):
        load(tmp_path / "missing.json")
    (tmp_path / "text.json").write_text("no json")
    with pytest.raises(TimelineError, match=r"text\.json: the timeline is not JSON"):
        load(tmp_path / "text.json")
    (tmp_path / "step.json").write_text(json.dumps(json.loads(to_json(simulated)) | {"memory": 1}))
    with pytest.raises(TimelineError, match=r"step\.json: the timeline's field 'memory' must be"):
        load(tmp_path / "step.json")
    with pytest.raises(ValueError, match="cannot write"):
        save(simulated, tmp_path / "nowhere" / "step.json")


def test_the_fixture_has_what_pictures_show(replica: ReplicaPlan) -> None:
    assert {chunk.kind.value for chunk in replica.chunks} == {"split", "hybrid", "batched"}
    assert len(replica.pipelines) == 2
