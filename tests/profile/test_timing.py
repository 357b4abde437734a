"""Which runs count, on made-up machines."""

from __future__ import annotations

import random

import pytest

from infinipipe.profile.timing import ATTEMPTS, FEWEST, Pace, Run, rounds, step_seconds
from infinipipe.runtime import Event


def run_of(seconds: float, *probes: float) -> Run:
    """A run of one action on each of as many stages as there are probes, one after the other."""
    events = [(Event("F0", stage * seconds, (stage + 1) * seconds, 0.0),) for stage in range(len(probes))]
    return Run(tuple(events), probes)


def test_a_step_lasts_from_the_first_start_to_the_last_end() -> None:
    assert run_of(2.0, 1.0, 1.0).makespan == 4.0
    assert step_seconds([run_of(seconds, 1.0) for seconds in (1.0, 9.0, 2.0)]) == 2.0


def test_a_slow_probe_on_any_stage_disturbs_a_run() -> None:
    good, slow, other = run_of(1.0, 1.0, 2.0), run_of(3.0, 1.5, 2.0), run_of(4.0, 1.0, 3.0)
    timed = [[good, slow, other, good], [good] * 6]
    pace = Pace.of(timed)
    assert [pace.count(runs) for runs in timed] == [2, 6]
    assert pace.undisturbed(timed[0]) == [good, good]
    assert pace.undisturbed(timed[0], range(1)) == [good, other, good]


def test_stages_may_differ_in_speed() -> None:
    runs = [run_of(1.0, 1.0, 5.0), run_of(1.0, 1.02, 5.1)]
    assert Pace.of([runs]).count(runs) == 2


def test_the_least_disturbed_runs_count_where_none_is_undisturbed() -> None:
    worst, bad, better = run_of(3.0, 9.0), run_of(2.0, 3.0), run_of(1.0, 2.0)
    pace = Pace.of([[worst, bad, better], [run_of(1.0, 1.0)] * 30])
    assert pace.undisturbed([worst, bad, better]) == [bad, better]
    assert len(pace.undisturbed([worst, bad, better])) == FEWEST
    assert pace.undisturbed([worst]) == [worst]
    assert pace.undisturbed([]) == []


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_rounds_go_on_until_all_plans_have_enough_undisturbed_runs(share: float) -> None:
    rng = random.Random(0)
    timed: list[list[Run]] = [[] for _ in range(5)]
    for index in rounds(timed, 3, random.Random(1)):
        timed[index].append(run_of(1.0, 2.0 if rng.random() < share else 1.0))
    pace = Pace.of(timed)
    counts = [pace.count(runs) for runs in timed]
    assert all(count == 3 or len(runs) == 3 * ATTEMPTS for count, runs in zip(counts, timed, strict=True))
    assert sum(counts) >= 12
    if not share:
        assert [len(runs) for runs in timed] == [3] * 5


def test_rounds_end_on_a_machine_that_is_never_quiet_again() -> None:
    timed: list[list[Run]] = [[run_of(1.0, 1.0)] * 2, []]
    for index in rounds(timed, 2, random.Random(0)):
        timed[index].append(run_of(1.0, 5.0 + len(timed[index])))
    assert [len(runs) for runs in timed] == [2, 2 * ATTEMPTS]


def test_every_plan_runs_before_any_runs_again() -> None:
    timed: list[list[Run]] = [[] for _ in range(6)]
    order = []
    for index in rounds(timed, 2, random.Random(3)):
        order.append(index)
        timed[index].append(run_of(1.0, 1.0))
    assert sorted(order[:6]) == sorted(order[6:]) == list(range(6))
    assert order[:6] != order[6:]
