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
"""The quantile of all probes of a stage that counts as usual."""
FEWEST = 2
"""Runs of a plan that count in any case, the least disturbed ones."""
ATTEMPTS = 4
"""How often a plan runs at most for each undisturbed run that is wanted."""


@dataclass(frozen=True)
class Run:
    """One run of a plan.

    Attributes:
        events: of every stage, its actions in order.
        probes: seconds of the slower probe of every stage; empty if it ran for its memory.
    """

    events: tuple[tuple[Event, ...], ...]
    probes: tuple[float, ...] = ()

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end, on all stages."""
        events = [event for row in self.events for event in row]
        return max(event.end for event in events) - min(event.start for event in events)


def undisturbed(timed: Sequence[Sequence[Run]]) -> list[list[Run]]:
    """Of the runs of every plan, in their order, those that are undisturbed, or the ``FEWEST`` least disturbed."""
    slowness = _slowness(timed)
    chosen = []
    for runs, values in zip(timed, slowness, strict=True):
        limit = sorted(values)[min(FEWEST, len(values)) - 1] if values else 0.0
        limit = max(limit, TOLERANCE)
        chosen.append([run for run, value in zip(runs, values, strict=True) if value <= limit])
    return chosen


def undisturbed_counts(timed: Sequence[Sequence[Run]]) -> list[int]:
    """How many runs of every plan were undisturbed."""
    return [sum(value <= TOLERANCE for value in values) for values in _slowness(timed)]


def rounds(timed: Sequence[Sequence[Run]], repeats: int, rng: random.Random) -> Iterator[int]:
    """The plans to run one after the other, until each has ``repeats`` undisturbed runs or ran ``ATTEMPTS`` times as often.

    The caller appends each run to ``timed`` before it asks for the next plan. All plans come in random order before any
    comes again.
    """
    for wanted in range(1, repeats + 1):
        for most in range(ATTEMPTS * (wanted - 1) + 1, ATTEMPTS * wanted + 1):
            counts = undisturbed_counts(timed)
            lacking = [i for i, count in enumerate(counts) if count < wanted and len(timed[i]) < most]
            yield from rng.sample(lacking, len(lacking))


def step_seconds(runs: Sequence[Run]) -> float:
    """The median makespan."""
    return statistics.median(run.makespan for run in runs)


def _slowness(timed: Sequence[Sequence[Run]]) -> list[list[float]]:
    """By how much the probes of every run took longer than usual, on the stage that was slowed down most."""
    everything = [run.probes for runs in timed for run in runs]
    if not everything:
        return [[] for _ in timed]
    usual = [_quantile(probes, USUAL) for probes in zip(*everything, strict=True)]
    return [[max(p / u - 1 for p, u in zip(run.probes, usual, strict=True)) for run in runs] for runs in timed]


def _quantile(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[round(share * (len(ranked) - 1))]
