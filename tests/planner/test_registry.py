"""Planners by name and from files: they plan like any other, and what is wrong with them is said in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinipipe.cost.presets import preset
from infinipipe.plan import PlanError
from infinipipe.planner import (
    BudgetError,
    Found,
    PlannerService,
    PlannerSettings,
    ReplicaSearch,
    check,
    get_planner,
    plan_step,
    planner_names,
    register_planner,
    registry,
)

LENGTHS = [9000, 20, 3000, 500]
COST = preset("7b-a100", 2)
SEARCH = """
def plan(search):
    for num_slices in search.slice_counts():
        search.consider(search.draft([search.chunking(num_slices).ordered()]))
    return search.refine_best()
"""


def write(tmp_path: Path, content: str) -> str:
    (tmp_path / "mine.py").write_text(content)
    return f"{tmp_path / 'mine.py'}:plan"


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_planner_from_a_file_plans_within_the_budget(tmp_path: Path, replicas: int) -> None:
    name = write(tmp_path, SEARCH)
    free = plan_step(LENGTHS, COST, PlannerSettings(planner=name, max_slices=4, replicas=replicas))
    assert free.metadata["planner"] == name
    with pytest.raises(BudgetError, match="needs about"):
        plan_step(LENGTHS, COST, PlannerSettings(planner=name, memory_budget=10**9, max_slices=4, replicas=replicas))
    budget = 28 * 10**9
    settings = PlannerSettings(planner=name, memory_budget=budget, max_slices=4, replicas=replicas)
    check(plan_step(LENGTHS, COST, settings, processes=replicas), COST, budget)


def test_a_planner_from_a_file_plans_ahead(tmp_path: Path) -> None:
    settings = PlannerSettings(planner=write(tmp_path, SEARCH), max_slices=4)
    with PlannerService(COST, settings) as service:
        service.order(1, LENGTHS)
        assert service.take(1).hash == plan_step(LENGTHS, COST, settings).hash


def test_a_registered_planner_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PLANNERS", dict(registry._PLANNERS))

    @register_planner("whole")
    def plan_whole(search: ReplicaSearch) -> Found:
        search.consider(search.draft([search.chunking(1).ordered()]))
        return search.refine_best()

    assert get_planner("whole") is plan_whole
    assert "whole" in planner_names()
    plan = plan_step(LENGTHS, COST, PlannerSettings(planner="whole"))
    assert all(chunk.partial is None for chunk in plan.all_chunks())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "the planner .*mine.py:plan returns a NoneType; it must return what it has found"),
        ("return search.draft([search.chunking(1).ordered()])", "returns a Draft; it must return what it has found"),
        ("return search.refine_best()", "the search has considered no draft"),
        ("search.draft([])", "a draft needs at least one chunk"),
        ("search.chunking()", "the planner .*mine.py:plan fails at line 2: TypeError"),
        (
            "search.consider(search.draft([search.chunking(3).ordered()[1:]]))\n    return search.refine_best()",
            "the plan of the planner .*mine.py:plan cannot run: chunk 0: .* leaves a gap",
        ),
        (
            "search.consider(search.draft([search.chunking(3).ordered()[:-1]]))\n    return search.refine_best()",
            "the plan of the planner .*mine.py:plan cannot run: sequence .* has .* tokens, but its slices cover",
        ),
    ],
)
def test_a_planner_that_goes_wrong_is_named(body: str, message: str, tmp_path: Path) -> None:
    name = write(tmp_path, f"def plan(search):\n    {body}\n")
    with pytest.raises(PlanError, match=message):
        plan_step(LENGTHS, COST, PlannerSettings(planner=name))


def test_settings_refuse_what_is_not_there() -> None:
    with pytest.raises(PlanError, match="there is no planner 'elastik'; use one of chunkflow, elastic, .*, or path/to"):
        PlannerSettings(planner="elastik")
    with pytest.raises(PlanError, match="cannot load the planner file 'absent.py'"):
        PlannerSettings(planner="absent.py:plan")
    with pytest.raises(PlanError, match="there is no schedule '2f2b'"):
        PlannerSettings(schedule="2f2b")
    with pytest.raises(PlanError, match="cannot load the schedule file 'absent.py'"):
        PlannerSettings(schedule="absent.py:order")
