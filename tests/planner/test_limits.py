"""A search's limits, by a clock of the test's own."""

from __future__ import annotations

import math

import pytest

from infinipipe.cost import preset
from infinipipe.planner import PlannerSettings, plan_step
from infinipipe.planner import search as searches
from infinipipe.planner.search import Limits


class Clock:
    """Time that passes when it is told to, and a little with every look."""

    def __init__(self, look: float = 0.0) -> None:
        self.now, self.look = 0.0, look

    def monotonic(self) -> float:
        self.now += self.look
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(searches.time, "monotonic", clock.monotonic)
    return clock


def test_no_try_begins_that_would_take_as_long_as_one_did_and_end_too_late(clock: Clock) -> None:
    limits = Limits(end=1.0, tries=10)
    assert limits.take_try()
    clock.now = 0.3
    assert limits.take_try(), "0.3 s were enough for the first"
    clock.now = 0.5
    assert limits.take_try()
    clock.now = 0.75
    assert not limits.take_try(), "another may take 0.3 s, of which there are 0.25"
    assert limits.tries == 7


def test_without_a_time_limit_only_tries_count(clock: Clock) -> None:
    limits = Limits(end=math.inf, tries=2)
    clock.now = 1e9
    assert [limits.take_try() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("planner", ["elastic", "elastic-paper", "fixed-chunk"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_plan_comes_whatever_the_limit_and_takes_fewer_looks_at_the_clock_the_shorter_it_is(
    planner: str, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [9000, 4000, 300, 200, 100, 50] * 8
    spent = []
    for limit in (1e-3, 0.2, 1e9):
        clock = Clock(look=0.01)
        monkeypatch.setattr(searches.time, "monotonic", clock.monotonic)
        settings = PlannerSettings(planner=planner, time_limit=limit, replicas=replicas, memory_budget=40 * 10**9)
        plan = plan_step(lengths, preset("7b-a100", 4), settings)
        plan.validate()
        spent.append(clock.now)
    assert spent[0] <= spent[1] <= spent[2]
    assert spent[1] <= 0.2 + 0.3 * replicas
