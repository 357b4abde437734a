from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infinipipe.plan import ReplicaPlan
from infinipipe.simulate import Simulation
from infinipipe.timeline import Source, Timeline, TimelineError, breakdown, from_json, load, save, to_json


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
        ({"messages": [[0, "up", 0, 0.0, 0.0, 0.0]]}, "field 'messages' must be a list of .source stage"),
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
