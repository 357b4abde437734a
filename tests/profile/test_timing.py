"""Which runs count, on made-up machines."""

from __future__ import annotations

import random

import pytest

from infinipipe.profile.timing import ATTEMPTS, Run, rounds, stage_processes, undisturbed
from infinipipe.runtime import Event


def run_of(*seconds: float) -> Run:
    """A run of one action on each process, one process after the other."""
    starts = [sum(seconds[:process]) for process in range(len(seconds))]
    return Run(tuple((Event("F0", start, start + own, start),) for start, own in zip(starts, seconds, strict=True)))


def test_a_step_lasts_from_the_first_start_to_the_last_end() -> None:
    assert run_of(2.0, 3.0).makespan == 5.0


def test_waiting_is_not_work_and_what_the_executor_does_between_actions_is() -> None:
    run = Run(((Event("F0", 1.0, 2.0, 0.5), Event("B0", 5.0, 7.0, 2.5)),))
    assert (run.busy(0, 0), run.busy(0, 1)) == (1.0, 2.5)
    assert run.busy_seconds == (3.5,)


def test_one_slow_process_disturbs_a_run() -> None:
    good, slow, other = run_of(1.0, 2.0), run_of(1.5, 2.0), run_of(1.05, 3.0)
    runs = [good, slow, other, good]
    assert undisturbed(runs) == [good, good]
    assert undisturbed(runs, range(1)) == [good, other, good]
    assert undisturbed(runs, range(1, 2)) == [good, slow, good]
    assert undisturbed([]) == []


def test_the_least_disturbed_run_counts_where_each_is_slow_somewhere() -> None:
    first, second = run_of(1.0, 3.0), run_of(1.5, 2.0)
    assert undisturbed([first, second]) == [first, second]
    assert undisturbed([first, run_of(1.6, 2.0)]) == [first]


def test_processes_of_a_stage_follow_each_other() -> None:
    run = run_of(*[1.0] * 6)
    assert [list(stage_processes(stage, 3, run)) for stage in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_rounds_go_on_until_enough_runs_of_every_plan_agree(share: float) -> None:
    rng = random.Random(0)
    timed: list[list[Run]] = [[] for _ in range(5)]
    for index in rounds(timed, 3, random.Random(1)):
        timed[index].append(run_of(rng.uniform(1.5, 9.0) if rng.random() < share else 1.0))
    assert all(len(undisturbed(runs)) == 3 or len(runs) > ATTEMPTS for runs in timed)
    assert sum(len(undisturbed(runs)) for runs in timed) >= 12
    if not share:
        assert [len(runs) for runs in timed] == [3] * 5


def test_rounds_end_on_a_machine_that_never_does_the_same_twice() -> None:
    timed: list[list[Run]] = [[run_of(1.0)] * 2, []]
    for index in rounds(timed, 2, random.Random(0)):
        timed[index].append(run_of(2.0 ** len(timed[index])))
    assert [len(runs) for runs in timed] == [2, 1 + ATTEMPTS]


def test_every_plan_runs_before_any_runs_again() -> None:
    timed: list[list[Run]] = [[] for _ in range(6)]
    order = []
    for index in rounds(timed, 2, random.Random(3)):
        order.append(index)
        timed[index].append(run_of(1.0))
    assert sorted(order[:6]) == sorted(order[6:]) == list(range(6))
    assert order[:6] != order[6:]
