"""``infinipipe timeline TIMELINE``: pictures of a simulated or measured step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infinipipe.cli.options import parse_options, require_output
from infinipipe.files import write_beside
from infinipipe.settings import SettingError, require_range
from infinipipe.timeline import Timeline, load
from infinipipe.timeline.figure import draw
from infinipipe.timeline.page import html_page
from infinipipe.timeline.png import to_png
from infinipipe.timeline.svg import to_svg
from infinipipe.timeline.trace import chrome_trace


@dataclass(frozen=True)
class TimelineOptions:
    """What to draw.

    Attributes:
        timeline: a timeline file, as 'infinipipe simulate' and 'infinipipe train' write it.
        measured: a second timeline file, drawn below the first on the same time axis.
        output: where to write; the suffix says what: .html (a page to explore), .svg or .png (a figure) or .json (a trace
            for ui.perfetto.dev or chrome://tracing).
        title: heading of the page.
        theme: colours of a figure.
        width: width of a figure in points; a .png has two pixels a point.
    """

    timeline: str
    measured: str | None = None
    output: str = "timeline.html"
    title: str = "InfiniPipe timeline"
    theme: Literal["light", "dark"] = "light"
    width: float = 1200.0

    def __post_init__(self) -> None:
        require_range("width", self.width, at_least=400, at_most=10_000)
        if Path(self.output).suffix.lower() not in WRITERS:
            raise SettingError(f"output is {self.output!r}; it must end in {', '.join(WRITERS)}")
        require_output(self.output, (self.timeline, self.measured))


Writer = Callable[[Sequence[Timeline], TimelineOptions], bytes]

WRITERS: dict[str, Writer] = {
    ".html": lambda timelines, options: html_page(timelines, title=options.title).encode(),
    ".svg": lambda timelines, options: to_svg(draw(timelines, width=options.width, theme=options.theme)).encode(),
    ".png": lambda timelines, options: to_png(draw(timelines, width=options.width, theme=options.theme)),
    ".json": lambda timelines, _: chrome_trace(timelines).encode(),
}


def run(arguments: Sequence[str]) -> int:
    """Draw one or two timelines."""
    options = parse_options(TimelineOptions, "timeline", "Draw a simulated or a measured step, or both.", arguments)
    timelines = [load(path) for path in (options.timeline, options.measured) if path is not None]
    write_beside(options.output, WRITERS[Path(options.output).suffix.lower()](timelines, options))
    print(f"wrote {options.output}")
    return 0
