"""One self-contained HTML page that shows timelines: no network, no library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from infinipipe.plan import KINDS
from infinipipe.timeline.breakdown import breakdown, exposed_communication
from infinipipe.timeline.describe import describe_chunks
from infinipipe.timeline.events import Timeline
from infinipipe.timeline.themes import THEMES, css_variables


def html_page(timelines: Sequence[Timeline], *, title: str = "InfiniPipe timeline") -> str:
    """The page: ``timelines`` one above the other on one time axis, each with its memory curves below."""
    page = resources.files("infinipipe.timeline").joinpath("page.html").read_text()
    data = json.dumps({"title": title, "timelines": [_view(t) for t in timelines]}, separators=(",", ":"))
    for name, text in (
        ("light", css_variables("light")),
        ("dark", css_variables("dark")),
        ("themes", json.dumps(THEMES)),
        ("data", data.replace("<", "\\u003c")),
    ):
        page = page.replace("{{" + name + "}}", text)
    return page


def _view(timeline: Timeline) -> dict[str, Any]:
    """What the page's script draws; its names are the contract between the two."""
    exposed = exposed_communication(timeline)
    return {
        "title": timeline.title,
        "source": timeline.source.value,
        "makespan": timeline.makespan,
        "budget": timeline.budget,
        "kinds": {kind.value: row.name for kind, row in KINDS.items()},
        "chunks": [asdict(chunk) for chunk in describe_chunks(timeline)],
        "stages": [
            {
                "spans": [
                    [s.action.kind.value, s.action.chunk, s.start, s.end, s.recompute, s.layers, s.action.part]
                    for s in row
                ],
                "exposed": list(exposed[stage].values()),
                "memory": timeline.memory[stage] if timeline.memory else [],
                "peak": timeline.peak(stage),
                "time": asdict(times),
            }
            for stage, (row, times) in enumerate(zip(timeline.spans, breakdown(timeline), strict=True))
        ],
        "messages": [[m.source, m.target, m.chunk, m.start, m.end] for m in timeline.messages],
    }
