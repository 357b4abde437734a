"""What happened, or will happen, in a step: one format for simulated and measured steps.

Seconds count from the start of the step, stages and chunks from 0.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from infinipipe.files import parse_json, write_beside
from infinipipe.plan import (
    ONE_EACH,
    Action,
    Channel,
    Chunk,
    Direction,
    Pipeline,
    Placement,
    PlanError,
    ReplicaPlan,
    Slice,
)

FORMAT = "infinipipe timeline"
VERSION = 2
T = TypeVar("T")


class TimelineError(ValueError):
    """A timeline file that cannot be read or drawn; the message says what is wrong with it."""


class Source(enum.StrEnum):
    """Where a timeline comes from."""

    SIMULATED = "simulated"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Span:
    """One action while it computes, from ``start`` to ``end``.

    ``recompute`` is how many of its seconds recompute, 0 if that is not known, and ``layers`` how many layers.
    """

    action: Action
    start: float
    end: float
    recompute: float = 0.0
    layers: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Message:
    """One transfer: both ends posted at ``ready``, on the link from ``start`` to ``end``.

    Attributes:
        source, target: stages.
        border: it passes from part ``border`` to the next, or back.
        direction: which of these.
        chunk: whose activations, or gradients.
    """

    source: int
    target: int
    border: int
    direction: Direction
    chunk: int
    ready: float
    start: float
    end: float

    @property
    def channel(self) -> Channel:
        return Channel(self.border, self.direction)


MemoryCurve = tuple[tuple[float, int], ...]
"""Bytes in use from each moment on, as (seconds, bytes) in order of time."""


@dataclass(frozen=True)
class Timeline:
    """One replica's step.

    Attributes:
        source: simulated or measured.
        pipelines: the chunks; actions number them through all pipelines.
        spans: for every stage, its actions in order.
        messages: transfers between stages, if they are known.
        memory: for every stage, its memory curve, empty if it is not known.
        budget: bytes that no device may exceed, if there is a limit.
        name: what to call the step in a heading.
        placement: the parts of every stage; if not given, each has one.
    """

    source: Source
    pipelines: tuple[Pipeline, ...]
    spans: tuple[tuple[Span, ...], ...]
    messages: tuple[Message, ...] = ()
    memory: tuple[MemoryCurve, ...] = ()
    budget: int | None = None
    name: str = ""
    placement: Placement = ONE_EACH

    def __post_init__(self) -> None:
        if not self.placement.parts:
            object.__setattr__(self, "placement", Placement.plain(len(self.spans)))

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(chunk for pipeline in self.pipelines for chunk in pipeline.chunks)

    @property
    def num_stages(self) -> int:
        return len(self.spans)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of its last action."""
        return max((span.end for row in self.spans for span in row), default=0.0)

    def part(self, stage: int, action: Action) -> int:
        """The part at which a stage's action computes."""
        return self.placement.parts[stage][0] if action.part is None else action.part

    @cached_property
    def messages_at(self) -> tuple[Mapping[tuple[Channel, int], Span], Mapping[tuple[Channel, int], Span]]:
        """The spans that make, and those that take, what passes between parts, by channel and chunk."""
        makes, takes = {}, {}
        for stage, row in enumerate(self.spans):
            for span in row:
                flow = span.action.kind.row.flow
                if flow is None:
                    continue
                part, back = self.part(stage, span.action), int(flow is Direction.BACKWARD)
                makes[Channel(part - back, flow), span.action.chunk] = span
                takes[Channel(part - 1 + back, flow), span.action.chunk] = span
        return makes, takes

    @property
    def title(self) -> str:
        return self.name or self.source.value

    def peak(self, stage: int) -> int:
        """The most bytes on the stage's memory curve; 0 if it is not known."""
        return max((size for _, size in self.memory[stage]), default=0) if self.memory else 0


class MeasuredEvent(Protocol):
    """What an executor records of an action: ``start`` and ``end`` in seconds on any clock that all stages share."""

    @property
    def action(self) -> str: ...

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


def measured_timeline(
    replica: ReplicaPlan,
    events: Sequence[Sequence[MeasuredEvent]],
    *,
    memory: Sequence[Sequence[tuple[float, int]]] = (),
    budget: int | None = None,
    name: str = "",
) -> Timeline:
    """The timeline of a measured step, which starts with its earliest event.

    Args:
        replica: the plan that ran.
        events: for every stage, what was recorded.
        memory: for every stage, samples of (seconds on the same clock, bytes in use).
        budget: bytes that no device may exceed.
        name: what to call the step.
    """
    origin = min((event.start for row in events for event in row), default=0.0)
    spans, program = [], replica.program
    for stage, row in enumerate(events):
        found = []
        again = dict(zip(replica.actions[stage], program.recomputes[program.base[stage] :].tolist(), strict=False))
        for event in row:
            action = Action.parse(event.action)
            part = replica.placement.parts[stage][0] if action.part is None else action.part
            layers = replica.recompute[part][action.chunk] if again[action] else 0
            found.append(Span(action, event.start - origin, event.end - origin, layers=layers))
        spans.append(tuple(found))
    curves = tuple(tuple((max(seconds - origin, 0.0), size) for seconds, size in row) for row in memory)
    return Timeline(
        Source.MEASURED,
        replica.pipelines,
        tuple(spans),
        memory=curves,
        budget=budget,
        name=name,
        placement=replica.placement,
    )


def to_json(timeline: Timeline) -> str:
    """The timeline as JSON text; ``from_json`` reads it back."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "source": timeline.source.value,
        "name": timeline.name,
        "budget": timeline.budget,
        "pipelines": [
            [[[s.sequence, s.start, s.stop, s.length] for s in chunk.slices] for chunk in pipeline.chunks]
            for pipeline in timeline.pipelines
        ],
        "spans": [[[str(s.action), s.start, s.end, s.recompute, s.layers] for s in row] for row in timeline.spans],
        "placement": [list(parts) for parts in timeline.placement.parts],
        "messages": [
            [m.source, m.target, m.border, m.direction.value, m.chunk, m.ready, m.start, m.end]
            for m in timeline.messages
        ],
        "memory": [[[seconds, size] for seconds, size in curve] for curve in timeline.memory],
    }
    return json.dumps(data, separators=(",", ":"))


def from_json(text: str) -> Timeline:
    """Read a timeline. Raises ``TimelineError``."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise TimelineError(f"the timeline is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise TimelineError("this is not a timeline; 'infinipipe simulate' and 'infinipipe train' write them")
    if data.get("version") != VERSION:
        raise TimelineError(f"the timeline has version {data.get('version')!r}; this release reads version {VERSION}")
    timeline = _timeline(data)
    _check(timeline)
    return timeline


def _timeline(data: Mapping[str, Any]) -> Timeline:
    def field(name: str, read: Callable[[Any], T], words: str) -> T:
        if name not in data:
            raise TimelineError(f"the timeline has no field {name!r}")
        try:
            return read(data[name])
        except PlanError as error:
            raise TimelineError(f"the timeline's field {name!r} is malformed: {error}") from None
        except (TypeError, ValueError, OverflowError):
            raise TimelineError(f"the timeline's field {name!r} must be {words}") from None

    return Timeline(
        source=field("source", Source, "'simulated' or 'measured'"),
        pipelines=field(
            "pipelines",
            lambda pipelines: tuple(
                Pipeline(tuple(Chunk(tuple(Slice(*map(int, s)) for s in chunk)) for chunk in pipeline))
                for pipeline in pipelines
            ),
            "a list of pipelines, lists of chunks, lists of slices [sequence, start, stop, length]",
        ),
        spans=field(
            "spans",
            lambda stages: tuple(
                tuple(Span(Action.parse(a), float(b), float(c), float(d), int(e)) for a, b, c, d, e in row)
                for row in stages
            ),
            "a list, for every stage, of [action, start, end, seconds of recompute, recomputed layers]",
        ),
        messages=field(
            "messages",
            lambda messages: tuple(
                Message(int(a), int(b), int(c), Direction(d), int(e), float(f), float(g), float(h))
                for a, b, c, d, e, f, g, h in messages
            ),
            "a list of [source stage, target stage, border, 'forward' or 'backward', chunk, ready, start, end]",
        ),
        placement=field(
            "placement",
            lambda rows: Placement(tuple(tuple(map(int, row)) for row in rows)),
            "a list, for every stage, of its parts",
        ),
        memory=field(
            "memory",
            lambda curves: tuple(tuple((float(seconds), int(size)) for seconds, size in curve) for curve in curves),
            "a list, for every stage, of [seconds, bytes]",
        ),
        budget=field("budget", lambda budget: None if budget is None else int(budget), "a number of bytes or null"),
        name=field("name", str, "a text"),
    )


def _check(timeline: Timeline) -> None:
    num_chunks = len(timeline.chunks)
    if timeline.memory and len(timeline.memory) != timeline.num_stages:
        raise TimelineError(f"the timeline has {timeline.num_stages} stages but {len(timeline.memory)} memory curves")
    if not all(chunk.slices for chunk in timeline.chunks):
        raise TimelineError("the timeline has a chunk without slices")
    if timeline.placement.num_stages != timeline.num_stages:
        raise TimelineError(
            f"the timeline has {timeline.num_stages} stages, but its placement {timeline.placement.num_stages}"
        )
    if timeline.num_stages and (fault := timeline.placement.fault()) is not None:
        raise TimelineError(fault)
    for stage, row in enumerate(timeline.spans):
        reached = 0.0
        for span in row:
            if span.action.chunk >= num_chunks:
                raise TimelineError(f"stage {stage} runs {span.action}, but there are {num_chunks} chunks")
            if span.action.part not in (None, *timeline.placement.parts[stage]):
                raise TimelineError(f"stage {stage} runs {span.action}, but it does not have that part")
            if not reached <= span.start <= span.end < math.inf:
                raise TimelineError(f"stage {stage}: the times of {span.action} are out of order")
            reached = span.end
    stage_of = dict(enumerate(timeline.placement.stage_of))
    makes, takes = timeline.messages_at
    for message in timeline.messages:
        channel, key = message.channel, (message.channel, message.chunk)
        ends = (stage_of.get(channel.source), stage_of.get(channel.target))
        if ends != (message.source, message.target) or key not in makes or key not in takes:
            raise TimelineError(
                f"a {message.direction.value} message takes chunk {message.chunk} from stage {message.source} to "
                f"{message.target} over border {message.border}, which do not both run it"
            )


def save(timeline: Timeline, path: str | Path) -> None:
    """Write the timeline as JSON, atomically. Raises ``WriteError``."""
    write_beside(path, (to_json(timeline) + "\n").encode())


def load(path: str | Path) -> Timeline:
    """Read a timeline file. Raises ``TimelineError`` naming the file."""
    try:
        return from_json(Path(path).read_text())
    except OSError as error:
        raise TimelineError(f"cannot read the timeline {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TimelineError(f"{path} is not a text file") from None
    except (TimelineError, PlanError) as error:
        raise TimelineError(f"{path}: {error}") from None
