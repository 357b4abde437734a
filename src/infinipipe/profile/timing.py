"""Which runs of a plan count, and how often each must run.

Other programs, and other guests of the same host, slow a processor down for a second or so, often without any trace in its own
accounts. So a plan runs until enough of its runs agree with the fastest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from infinipipe.runtime import Event

TOLERANCE = 0.08
"""A run in which a process computed for longer than in the plan's fastest run by no more than this share is undisturbed."""
ATTEMPTS = 4
"""How often a plan runs at most for every undisturbed run that is wanted."""


@dataclass(frozen=True)
class Run:
    """One run of a plan: events of every process, stage after stage, its actions in order."""

    events: tuple[tuple[Event, ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end, on all processes."""
        events = [event for row in self.events for event in row]
        return max(event.end for event in events) - min(event.start for event in events)

    def busy(self, process: int, place: int) -> float:
        """Seconds for which a process worked for its action at ``place``.

        They include those between the action before it and its asking for its input, in which the executor works for it.
        """
        row = self.events[process]
        event = row[place]
        idle_from = event.start - event.waited
        before = 0.0 if place == 0 else max(0.0, idle_from - row[place - 1].end)
        return event.end - event.start + before

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds for which every process worked."""
        return tuple(sum(self.busy(p, place) for place in range(len(row))) for p, row in enumerate(self.events))


def stage_processes(stage: int, num_stages: int, run: Run) -> range:
    """The processes that share a stage, by their places in :attr:`Run.events`."""
    shards = len(run.events) // num_stages
    return range(stage * shards, (stage + 1) * shards)


def undisturbed(runs: Sequence[Run], processes: range | None = None) -> list[Run]:
    """Of a plan's runs, in their order, those in which none of ``processes`` (all by default) was slowed down."""
    if not runs:
        return []
    chosen = range(len(runs[0].events)) if processes is None else processes
    fastest = [min(run.busy_seconds[process] for run in runs) for process in chosen]
    slowness = [max(run.busy_seconds[p] / best for p, best in zip(chosen, fastest, strict=True)) - 1 for run in runs]
    limit = max(TOLERANCE, min(slowness))
    return [run for run, value in zip(runs, slowness, strict=True) if value <= limit]


def rounds(timed: Sequence[Sequence[Run]], repeats: int, rng: random.Random) -> Iterator[int]:
    """The plans to run one after the other, until each has ``repeats`` undisturbed runs, or failed ``ATTEMPTS`` times to get one more.

    The caller appends each run to ``timed`` before it asks for the next plan. All plans come in random order before any
    comes again.
    """
    for wanted in range(1, repeats + 1):
        for _ in range(ATTEMPTS):
            lacking = [i for i, runs in enumerate(timed) if len(undisturbed(runs)) < wanted]
            yield from rng.sample(lacking, len(lacking))
