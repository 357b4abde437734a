"""Schedules for any placement of parts, made by running the pipeline: each stage does what is ready and most urgent.

``interleaved`` computes whole backwards, ``zero-bubble`` backwards in two halves: the second, for which no other stage waits, fills
what would be idle (zero-bubble pipeline parallelism, arXiv 2401.10241 and 2405.15362, here for chunks of unequal size that may be
slices). Every part computes chunks in their order and backwards in theirs, so that messages keep their order whatever the
placement; and since what is written down has run, it cannot deadlock.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from infinipipe.plan.kinds import ActionKind, Direction
from infinipipe.plan.placement import Placement
from infinipipe.plan.schedules import backward_order, register_schedule
from infinipipe.plan.types import Action, Chunk, num_splits

QUADRATIC = 2**15
"""Tokens of a sequence whose attention takes as long as all the rest: about that of a model of 7 billion parameters.

Only the order of actions depends on it.
"""


@register_schedule("interleaved")
def interleaved(
    pipelines: Sequence[Sequence[Chunk]], placement: Placement, warmup: Sequence[int] | None = None
) -> list[list[Action]]:
    """Backwards as soon as they can, forwards of later parts before those of earlier ones; for any placement."""
    return _Run(pipelines, placement, warmup, split=False).lists()


@register_schedule("zero-bubble")
def zero_bubble(
    pipelines: Sequence[Sequence[Chunk]], placement: Placement, warmup: Sequence[int] | None = None
) -> list[list[Action]]:
    """The same with backwards in two halves. No stage holds more chunks, weight gradients to come included, than the one that holds
    the most without: later stages put these off for longer, as in ZB-H1.
    """
    return _Run(pipelines, placement, warmup, split=True).lists()


def chunk_weight(chunk: Chunk) -> float:
    """About how long a chunk takes, in tokens without attention."""
    return sum(s.num_tokens + (s.stop * s.stop - s.start * s.start) / QUADRATIC for s in chunk.slices)


class _Run:
    """The pipeline as it runs: a clock for every stage, and how far every part has come."""

    def __init__(
        self, pipelines: Sequence[Sequence[Chunk]], placement: Placement, warmup: Sequence[int] | None, *, split: bool
    ) -> None:
        chunks = [chunk for pipeline in pipelines for chunk in pipeline]
        self.placement, self.split = placement, split
        self.weights = [chunk_weight(chunk) for chunk in chunks]
        self.order = _backward_orders(pipelines)
        parts = range(placement.num_parts)
        self.forward_end = [[math.inf] * len(chunks) for _ in parts]
        self.backward_end = [[math.inf] * len(chunks) for _ in parts]
        self.forwards, self.backwards = [0 for _ in parts], [0 for _ in parts]
        self.weights_due: list[deque[tuple[int, int]]] = [deque() for _ in range(placement.num_stages)]
        self.held, self.went_backward = [0] * placement.num_stages, [False] * placement.num_stages
        splits = max(map(num_splits, pipelines), default=1)
        self.most = _most_held(placement, splits) if warmup is None else [count + 1 for count in warmup]
        self.most_due = [max(self.most) - most for most in self.most]
        self.result: list[list[Action]] = [[] for _ in range(placement.num_stages)]

    def lists(self) -> list[list[Action]]:
        """The actions of every stage, in the order in which they run."""
        stages = range(self.placement.num_stages)
        moments = [(0.0, stage) for stage in stages]
        busy_until = [0.0 for _ in stages]
        now = 0.0
        while moments or not all(map(self._is_done, stages)):
            if not moments:
                # All wait, and only since they hold their most: the stage whose forward is due first takes one more.
                when, stage = self._over_the_limit()
                moments = [(max(when, busy_until[stage], now), stage)]
            now, stage = heapq.heappop(moments)
            if now < busy_until[stage]:
                continue
            chosen = self._choose(stage, now)
            if chosen is None:
                continue
            end = busy_until[stage] = self._compute(stage, now, *chosen)
            # Whatever becomes ready does so at the end of an action: then every stage that is free looks again.
            for other in stages:
                if busy_until[other] <= end:
                    heapq.heappush(moments, (end, other))
        return self.result

    def _ready_backward(self, part: int) -> float:
        """When the next backward of a part can run; infinite if that is not known."""
        if self.backwards[part] == len(self.order):
            return math.inf
        chunk = self.order[self.backwards[part]]
        own = self.forward_end[part][chunk]
        if part == self.placement.num_parts - 1:
            return own
        return max(own, self.backward_end[part + 1][chunk])

    def _ready_forward(self, part: int) -> float:
        chunk = self.forwards[part]
        if chunk == len(self.weights):
            return math.inf
        return 0.0 if part == 0 else self.forward_end[part - 1][chunk]

    def _choose(self, stage: int, now: float) -> tuple[ActionKind, int, int] | None:
        """What a stage does now, of what is ready.

        Weight gradients if it has put off its most; else a forward, if it may hold one more, and a backward in turn, of the deepest
        part that has one; else weight gradients.
        """
        due = self.weights_due[stage]
        gradients = (ActionKind.BACKWARD_WEIGHT, *due[0]) if due else None
        if len(due) > self.most_due[stage]:
            return gradients
        backward, forward = self._backward(stage, now), self._forward(stage, now)
        both = (forward, backward) if self.went_backward[stage] else (backward, forward)
        return both[0] or both[1] or gradients

    def _backward(self, stage: int, now: float) -> tuple[ActionKind, int, int] | None:
        ready = [part for part in self.placement.parts[stage] if self._ready_backward(part) <= now]
        if not ready:
            return None
        part = min(ready, key=lambda part: (self.backwards[part], -part))
        kind = ActionKind.BACKWARD_INPUT if self.split else ActionKind.BACKWARD
        return kind, part, self.order[self.backwards[part]]

    def _forward(self, stage: int, now: float) -> tuple[ActionKind, int, int] | None:
        if self.held[stage] >= self.most[stage]:
            return None
        for part in reversed(self.placement.parts[stage]):
            if self._ready_forward(part) <= now:
                return ActionKind.FORWARD, part, self.forwards[part]
        return None

    def _is_done(self, stage: int) -> bool:
        return all(self.backwards[part] == len(self.order) for part in self.placement.parts[stage])

    def _over_the_limit(self) -> tuple[float, int]:
        """Let the stage with the earliest forward of all hold one more; when that is, and which stage."""
        when = [min(map(self._ready_forward, parts)) for parts in self.placement.parts]
        stage = min(range(len(when)), key=when.__getitem__)
        self.most[stage] = self.held[stage] + 1
        return when[stage], stage

    def _compute(self, stage: int, now: float, kind: ActionKind, part: int, chunk: int) -> float:
        """Do it; returns when it ends."""
        weight = self.weights[chunk]
        name = part if len(self.placement.parts[stage]) > 1 else None
        self.result[stage].append(Action(kind, chunk, name))
        flow = kind.row.flow
        if flow is None:
            self.weights_due[stage].popleft()
            return now + weight
        self.went_backward[stage] = flow is Direction.BACKWARD
        if flow is Direction.FORWARD:
            self.forward_end[part][chunk] = now + weight
            self.forwards[part] += 1
            self.held[stage] += 1
            return now + weight
        seconds = weight if self.split else 2 * weight
        self.backward_end[part][chunk] = now + seconds
        self.backwards[part] += 1
        self.held[stage] -= 1
        if self.split:
            self.weights_due[stage].append((part, chunk))
        return now + seconds


def _backward_orders(pipelines: Sequence[Sequence[Chunk]]) -> list[int]:
    """Chunks of all pipelines in backward order."""
    order: list[int] = []
    for chunks in pipelines:
        first = len(order)
        order += [first + chunk for chunk in backward_order(chunks)]
    return order


def _most_held(placement: Placement, splits: int) -> list[int]:
    """How many chunks every stage may hold, each of its parts counted.

    A chunk leaves part ``k`` of ``P`` for ``P - 1 - k`` parts there and back, during which a stage of ``v`` parts turns to
    ``(P - 1 - k) / v`` other chunks, if no one waits: that many, and itself. With several parts on a stage twice as many are in
    flight, as in interleaved 1F1B (arXiv 2104.04473) and ZB-V. The most finely cut sequence must fit at every part beside that.
    """
    most = []
    for parts in placement.parts:
        others = sum(placement.num_parts - 1 - part for part in parts) / len(parts)
        ahead = others if len(parts) == 1 else 2 * others
        most.append(math.ceil(ahead) + len(parts) * splits)
    return most
