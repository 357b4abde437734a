"""Which runs of a plan count, and how often each must run: the machine's own pace tells disturbed runs from others.

Other programs, and other guests of the same host, slow a processor down for a second or so, often without any trace in its
own accounts. So every process times a small piece of fixed work, the probe, right before and after a run.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infinipipe.runtime import Event

TOLERANCE = 0.08
"""A run whose probes took no more than this share longer than usual is undisturbed."""
USUAL = 0.1
"""The quantile of all probes of a process that counts as usual."""
FEWEST = 2
"""Runs of a plan that count in any case, the least disturbed ones."""
ATTEMPTS = 4
"""How often a plan runs at most for each undisturbed run that is wanted."""


@dataclass(frozen=True)
class Run:
    """One run of a plan.

    Attributes:
        events: of every process, stage after stage, its actions in order.
        probes: seconds of the slower probe of every process; empty if it ran for its memory.
    """

    events: tuple[tuple[Event, ...], ...]
    probes: tuple[float, ...] = ()

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end, on all processes."""
        events = [event for row in self.events for event in row]
        return max(event.end for event in events) - min(event.start for event in events)


def stage_processes(stage: int, num_stages: int, run: Run) -> range:
    """The processes that share a stage, by their places in :attr:`Run.events`."""
    shards = len(run.events) // num_stages
    return range(stage * shards, (stage + 1) * shards)


@dataclass(frozen=True)
class Pace:
    """How fast the processes usually are: seconds of each one's probe."""

    usual: tuple[float, ...]

    @classmethod
    def of(cls, timed: Sequence[Sequence[Run]]) -> Pace:
        """The pace in all runs of all plans."""
        probes = [run.probes for runs in timed for run in runs]
        return cls(tuple(_quantile(values, USUAL) for values in zip(*probes, strict=True)))

    def slowness(self, run: Run, processes: range | None = None) -> float:
        """By how much the probes of a run took longer than usual, relative, on the most disturbed of ``processes``."""
        chosen = range(len(self.usual)) if processes is None else processes
        return max(run.probes[process] / self.usual[process] - 1 for process in chosen)

    def undisturbed(self, runs: Sequence[Run], processes: range | None = None) -> list[Run]:
        """Of some runs of a plan, in their order, those in which no such process was disturbed, or the ``FEWEST`` least disturbed."""
        values = [self.slowness(run, processes) for run in runs]
        limit = max(TOLERANCE, sorted(values)[:FEWEST][-1]) if values else TOLERANCE
        return [run for run, value in zip(runs, values, strict=True) if value <= limit]

    def count(self, runs: Sequence[Run]) -> int:
        """How many runs were undisturbed on all processes."""
        return sum(self.slowness(run) <= TOLERANCE for run in runs)


def rounds(timed: Sequence[Sequence[Run]], repeats: int, rng: random.Random) -> Iterator[int]:
    """The plans to run one after the other, until each has ``repeats`` undisturbed runs or ran ``ATTEMPTS`` times as often.

    The caller appends each run to ``timed`` before it asks for the next plan. All plans come in random order before any
    comes again.
    """
    for wanted in range(1, repeats + 1):
        for most in range(ATTEMPTS * (wanted - 1) + 1, ATTEMPTS * wanted + 1):
            pace = Pace.of(timed)
            lacking = [i for i, runs in enumerate(timed) if pace.count(runs) < wanted and len(runs) < most]
            yield from rng.sample(lacking, len(lacking))


def step_seconds(runs: Sequence[Run]) -> float:
    """The median makespan."""
    return statistics.median(run.makespan for run in runs)


def _quantile(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[round(share * (len(ranked) - 1))]
