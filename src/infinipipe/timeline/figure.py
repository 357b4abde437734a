"""Timelines as a list of shapes, which :mod:`svg` and :mod:`png` paint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from infinipipe.plan import KINDS
from infinipipe.timeline.breakdown import breakdown, exposed_communication
from infinipipe.timeline.describe import ChunkDescription, describe_chunks
from infinipipe.timeline.events import Span, Timeline
from infinipipe.timeline.themes import THEMES, ThemeName
from infinipipe.timeline.units import readable_bytes, readable_seconds, ticks

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, with a text that a viewer may show on hover."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str | None = None
    title: str = ""


@dataclass(frozen=True, slots=True)
class Lines:
    """Connected or, if ``pairs``, separate lines from every even to the next odd point."""

    points: tuple[Point, ...]
    color: str
    width: float = 1.0
    dashed: bool = False
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class Polygon:
    """A filled polygon."""

    points: tuple[Point, ...]
    fill: str


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text, centred vertically on ``y``."""

    x: float
    y: float
    text: str
    color: str
    size: float = 12.0
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Shape = Box | Lines | Polygon | Label


@dataclass(frozen=True)
class Figure:
    """Shapes, painted in order, on a background of ``width`` by ``height`` points."""

    width: float
    height: float
    background: str
    shapes: tuple[Shape, ...]


LEFT, RIGHT, MARGIN = 74.0, 132.0, 14.0
LEGEND_LINE, HEADING, ROW, ROW_GAP, AXIS, CURVE, CURVE_GAP, PANEL_GAP = 22.0, 30.0, 26.0, 5.0, 30.0, 38.0, 7.0, 14.0
STRIP = 5.0
"""Height of the mark, inside an action, of recompute whose time is not known, and of a tail slice's whole sequences."""


def draw(timelines: Sequence[Timeline], *, width: float = 1200.0, theme: ThemeName = "light") -> Figure:
    """Timelines one above the other on one time axis, each with its memory curves below."""
    shapes, y = _legend(timelines, THEMES[theme], width)
    longest = max((timeline.makespan for timeline in timelines), default=0.0) or 1.0
    for timeline in timelines:
        panel = _Panel(timeline, THEMES[theme], width, longest)
        shapes += panel.shapes(y)
        y += panel.height + PANEL_GAP
    return Figure(width, y - PANEL_GAP + MARGIN, THEMES[theme]["panel"], tuple(shapes))


def hatching(x: float, y: float, width: float, height: float, spacing: float = 6.0) -> tuple[Point, ...]:
    """End points, two by two, of the rising diagonals that hatch a rectangle."""
    points: list[Point] = []
    offset = spacing / 2
    while offset < width + height:
        begin, end = max(0.0, offset - height), min(offset, width)
        points += [(x + begin, y + offset - begin), (x + end, y + offset - end)]
        offset += spacing
    return tuple(points)


class _Panel:
    """One timeline's part of the figure."""

    def __init__(self, timeline: Timeline, theme: dict[str, str], width: float, longest: float) -> None:
        self._timeline = timeline
        self._theme = theme
        self._plot = width - LEFT - RIGHT
        self._longest = longest
        self._chunks = describe_chunks(timeline)
        self._times = breakdown(timeline)

    @property
    def _has_memory(self) -> bool:
        return any(self._timeline.memory)

    @property
    def height(self) -> float:
        stages = self._timeline.num_stages
        curves = stages * (CURVE + CURVE_GAP) + AXIS if self._has_memory else 0.0
        return HEADING + stages * (ROW + ROW_GAP) + AXIS + curves

    def shapes(self, y: float) -> Iterator[Shape]:
        """All shapes of the panel, whose top is at ``y``."""
        yield from self._heading(y + HEADING / 2)
        y += HEADING
        exposed = exposed_communication(self._timeline)
        for stage, spans in enumerate(self._timeline.spans):
            yield from self._row(y, stage, spans, list(exposed[stage].values()))
            y += ROW + ROW_GAP
        yield from self._axis(y - ROW_GAP + 3)
        y += AXIS
        if self._has_memory:
            ceiling = 1.08 * max(
                self._timeline.budget or 0, *map(self._timeline.peak, range(self._timeline.num_stages)), 1
            )
            for stage in range(self._timeline.num_stages):
                yield from self._curve(y, stage, ceiling)
                y += CURVE + CURVE_GAP
            yield from self._axis(y - CURVE_GAP + 3)

    def _x(self, seconds: float) -> float:
        return LEFT + min(seconds / self._longest, 1.0) * self._plot

    def _heading(self, y: float) -> Iterator[Shape]:
        timeline, theme = self._timeline, self._theme
        title = timeline.title[:1].upper() + timeline.title[1:]
        yield Label(MARGIN, y, title, theme["text"], 15, bold=True)
        whole = max(timeline.makespan * timeline.num_stages, 1e-12)
        facts = [f"step {readable_seconds(timeline.makespan)}"]
        shares = (
            ("bubble", sum(t.bubble for t in self._times)),
            ("exposed communication", sum(t.communication for t in self._times)),
            ("recompute", sum(t.recompute for t in self._times)),
        )
        facts += [f"{name} {seconds / whole:.1%}" for name, seconds in shares if seconds > 0]
        yield Label(LEFT + self._plot, y, " · ".join(facts), theme["muted"], 12, "end")

    def _row(
        self, y: float, stage: int, spans: Sequence[Span], exposed: Sequence[tuple[float, float]]
    ) -> Iterator[Shape]:
        theme, end = self._theme, self._x(self._timeline.makespan)
        yield Label(LEFT - 10, y + ROW / 2, f"stage {stage}", theme["muted"], anchor="end")
        yield Box(LEFT, y, end - LEFT, ROW, theme["bubble"], theme["bubble-edge"], f"bubble of stage {stage}")
        for begin, until in exposed:
            yield Box(self._x(begin), y + 1, max(self._x(until) - self._x(begin), 0.5), ROW - 2, theme["link"])
        for span in spans:
            yield from self._span(y, stage, span, self._chunks[span.action.chunk])
        share = self._times[stage].bubble / max(self._timeline.makespan, 1e-12)
        yield Label(LEFT + self._plot + 10, y + ROW / 2, f"bubble {share:.1%}", theme["muted"])

    def _span(self, y: float, stage: int, span: Span, chunk: ChunkDescription) -> Iterator[Shape]:
        theme, x = self._theme, self._x(span.start)
        width = self._x(span.end) - x
        inner = max(width - (1.0 if width > 3 else 0.0), 0.5)
        words = f"{span.action.kind.row.name} of chunk {span.action.chunk} on {self._place(stage, span)}"
        title = (
            f"{words}, {readable_seconds(span.seconds)}; {chunk.kind}, {chunk.num_tokens:,} tokens; {chunk.slices[0]}"
        )
        yield Box(x, y + 1, inner, ROW - 2, chunk.colors[span.action.kind.value], title=title)
        if span.recompute > 0 and width > 2:
            points = hatching(x, y + 1, inner * min(span.recompute / span.seconds, 1.0), ROW - 2)
            yield Lines(points, theme["recompute"], 1.4, pairs=True)
        elif span.layers > 0 and width > 2:
            yield Lines(hatching(x, y + 1, inner, STRIP), theme["recompute"], 1.4, pairs=True)
        if chunk.kind == "hybrid" and width > 5:
            yield Box(x, y + ROW - 1 - STRIP, inner, STRIP, theme["packed"])
        text = str(span.action)
        if width > 6 + 7.5 * len(text):
            yield Label(x + inner / 2, y + ROW / 2, text, theme["on-chunk"], 11, "middle")

    def _place(self, stage: int, span: Span) -> str:
        """Where a span computes, in words."""
        return f"stage {stage}" if span.action.part is None else f"stage {stage}, part {span.action.part}"

    def _curve(self, y: float, stage: int, ceiling: float) -> Iterator[Shape]:
        timeline, theme, bottom = self._timeline, self._theme, y + CURVE
        yield Label(LEFT - 10, y + CURVE / 2, f"stage {stage}", theme["muted"], anchor="end")

        def level(size: float) -> float:
            return bottom - size / ceiling * CURVE

        curve = timeline.memory[stage]
        if curve:
            line = [(self._x(curve[0][0]), level(curve[0][1]))]
            for (_, before), (seconds, size) in pairwise(curve):
                line += [(self._x(seconds), level(before)), (self._x(seconds), level(size))]
            line.append((max(self._x(timeline.makespan), line[-1][0]), line[-1][1]))
            yield Polygon(((line[0][0], bottom), *line, (line[-1][0], bottom)), theme["memory-fill"])
            yield Lines(tuple(line), theme["memory"], 1.3)
        yield Lines(((LEFT, bottom), (LEFT + self._plot, bottom)), theme["line"])
        right, middle = LEFT + self._plot + 10, y + CURVE / 2
        peak = timeline.peak(stage)
        over = timeline.budget is not None and peak > timeline.budget
        yield Label(
            right,
            middle - (7 if timeline.budget else 0),
            f"peak {readable_bytes(peak)}",
            theme["budget" if over else "muted"],
        )
        if timeline.budget:
            yield Label(right, middle + 8, f"of {readable_bytes(timeline.budget)}", theme["muted"])
            height = level(timeline.budget)
            yield Lines(((LEFT, height), (LEFT + self._plot, height)), theme["budget"], 1.2, dashed=True)

    def _axis(self, y: float) -> Iterator[Shape]:
        theme = self._theme
        marks, unit = ticks(self._longest, int(self._plot // 110))
        yield Lines(((LEFT, y), (LEFT + self._plot, y)), theme["line"])
        for seconds, text in marks:
            yield Lines(((self._x(seconds), y), (self._x(seconds), y + 4)), theme["line"])
            yield Label(self._x(seconds), y + 13, text, theme["muted"], 11, "middle")
        yield Label(LEFT + self._plot + 24, y + 13, unit, theme["muted"], 11)


def _legend(timelines: Sequence[Timeline], theme: dict[str, str], width: float) -> tuple[list[Shape], float]:
    """The kinds of marks that occur in ``timelines``, in as many lines as they need, and where they end."""
    chunks = [chunk for timeline in timelines for chunk in describe_chunks(timeline)]
    cut = next((chunk for chunk in chunks if chunk.kind != "batched"), None)
    packed = next((chunk for chunk in chunks if chunk.kind == "batched"), None)
    shapes: list[Shape] = []
    x, y = MARGIN, MARGIN
    for text, swatch in _legend_entries(timelines, theme, cut, packed):
        needed = 42 + 6.7 * len(text)
        if x > MARGIN and x + needed > width:
            x, y = MARGIN, y + LEGEND_LINE
        shapes += [*swatch(x, y), Label(x + 28, y + 6.5, text, theme["muted"])]
        x += needed
    return shapes, y + LEGEND_LINE + 8


Swatch = Callable[[float, float], Sequence[Shape]]


def _legend_entries(
    timelines: Sequence[Timeline],
    theme: dict[str, str],
    cut: ChunkDescription | None,
    packed: ChunkDescription | None,
) -> Iterator[tuple[str, Swatch]]:
    spans = [span for timeline in timelines for row in timeline.spans for span in row]
    kinds = [kind for kind in KINDS if any(span.action.kind is kind for span in spans)]
    words = ", ".join(kind.row.name for kind in kinds)

    def shades(chunk: ChunkDescription) -> Swatch:
        width = 22 / max(len(kinds), 1)
        return lambda x, y: [Box(x + i * width, y, width, 13, chunk.colors[k.value]) for i, k in enumerate(kinds)]

    def box(fill: str, edge: str | None = None) -> Swatch:
        return lambda x, y: [Box(x, y, 22, 13, fill, edge)]

    if cut is not None:
        yield f"slices, a colour a sequence: {words}", shades(cut)
    if packed is not None:
        yield f"packed sequences: {words}", shades(packed)
    sample = cut or packed
    again = next((span for span in spans if span.layers > 0), None)
    if sample is not None and again is not None:
        fill = sample.colors[again.action.kind.value]
        yield (
            "recompute",
            lambda x, y: [
                Box(x, y, 22, 13, fill),
                Lines(hatching(x, y, 22, 13), theme["recompute"], 1.4, pairs=True),
            ],
        )
    yield "bubble", box(theme["bubble"], theme["bubble-edge"])
    if any(timeline.messages for timeline in timelines):
        yield "exposed communication", box(theme["link"])
    if any(timeline.budget and any(timeline.memory) for timeline in timelines):
        yield (
            "memory budget",
            lambda x, y: [Lines(((x, y + 6.5), (x + 22, y + 6.5)), theme["budget"], 1.2, dashed=True)],
        )
