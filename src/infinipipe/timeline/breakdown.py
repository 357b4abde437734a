"""Where each stage's time goes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from infinipipe.plan import Direction
from infinipipe.timeline.events import Message, Span, Timeline


@dataclass(frozen=True)
class StageTime:
    """One stage's seconds; they add up to the step's.

    Attributes:
        forward: computing forwards.
        backward: computing backwards, without recompute, whole or their first half.
        weight: computing their second half, the gradients of weights.
        recompute: recomputing.
        communication: idle while the message that the next action needs waits for the link or is on it.
        warmup_bubble: otherwise idle until a pipeline's first backward.
        steady_bubble: otherwise idle from there to the pipeline's last forward.
        cooldown_bubble: otherwise idle after the pipeline's last forward, and at the end of the step.
    """

    forward: float
    backward: float
    weight: float
    recompute: float
    communication: float
    warmup_bubble: float
    steady_bubble: float
    cooldown_bubble: float

    @property
    def bubble(self) -> float:
        return self.warmup_bubble + self.steady_bubble + self.cooldown_bubble

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, field.name) for field in fields(self))


def breakdown(timeline: Timeline) -> tuple[StageTime, ...]:
    """Where every stage's time goes.

    Idle time before an action belongs to the phase of the action's pipeline at that stage. Without messages in the
    timeline, communication is counted as bubble.
    """
    pipeline_of = [number for number, pipeline in enumerate(timeline.pipelines) for _ in pipeline.chunks]
    exposed = exposed_communication(timeline)
    return tuple(
        _stage_time(row, exposed[stage], pipeline_of, timeline.makespan) for stage, row in enumerate(timeline.spans)
    )


def exposed_communication(timeline: Timeline) -> tuple[dict[int, tuple[float, float]], ...]:
    """For every stage, the interval before the action at a position in which the stage waits for the link."""
    takes = timeline.messages_at[1]
    waits_for: dict[int, Message] = {
        id(takes[m.channel, m.chunk]): m for m in timeline.messages if (m.channel, m.chunk) in takes
    }
    return tuple(dict(_exposed(row, waits_for)) for row in timeline.spans)


def _exposed(spans: tuple[Span, ...], waits_for: dict[int, Message]) -> Iterator[tuple[int, tuple[float, float]]]:
    reached = 0.0
    for position, span in enumerate(spans):
        message = waits_for.get(id(span))
        if message is not None:
            begin, end = max(message.ready, reached), min(message.end, span.start)
            if end > begin:
                yield position, (begin, end)
        reached = span.end


def _stage_time(
    spans: tuple[Span, ...], exposed: dict[int, tuple[float, float]], pipeline_of: list[int], makespan: float
) -> StageTime:
    first_backward: dict[int, int] = {}
    last_forward: dict[int, int] = {}
    for position, span in enumerate(spans):
        pipeline = pipeline_of[span.action.chunk]
        if span.action.kind.row.flow is Direction.FORWARD:
            last_forward[pipeline] = position
        elif span.action.kind.row.flow is Direction.BACKWARD:
            first_backward.setdefault(pipeline, position)
    flows: dict[Direction | None, float] = {Direction.FORWARD: 0.0, Direction.BACKWARD: 0.0, None: 0.0}
    recompute = communication = reached = 0.0
    warmup = steady = cooldown = 0.0
    for position, span in enumerate(spans):
        begin, end = exposed.get(position, (0.0, 0.0))
        communication += end - begin
        idle = span.start - reached - (end - begin)
        pipeline = pipeline_of[span.action.chunk]
        if position <= first_backward.get(pipeline, len(spans)):
            warmup += idle
        elif position <= last_forward.get(pipeline, -1):
            steady += idle
        else:
            cooldown += idle
        flows[span.action.kind.row.flow] += span.seconds - span.recompute
        recompute += span.recompute
        reached = span.end
    return StageTime(
        forward=flows[Direction.FORWARD],
        backward=flows[Direction.BACKWARD],
        weight=flows[None],
        recompute=recompute,
        communication=communication,
        warmup_bubble=warmup,
        steady_bubble=steady,
        cooldown_bubble=cooldown + makespan - reached,
    )
