"""Timelines as Chrome trace events, which ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from infinipipe.timeline.describe import describe_chunks
from infinipipe.timeline.events import Timeline

MICROSECONDS = 1e6


def chrome_trace(timelines: Sequence[Timeline]) -> str:
    """The trace as JSON text: a process per timeline, a thread per stage, a counter per memory curve, arrows for messages."""
    events = [event for process, timeline in enumerate(timelines) for event in _events(process, timeline)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _events(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", process, {"name": timeline.title})
    yield _metadata("process_sort_index", process, {"sort_index": process})
    for stage in range(timeline.num_stages):
        yield _metadata("thread_name", process, {"name": f"stage {stage}"}, stage)
        yield _metadata("thread_sort_index", process, {"sort_index": stage}, stage)
    chunks = describe_chunks(timeline)
    for stage, row in enumerate(timeline.spans):
        for span in row:
            described = chunks[span.action.chunk]
            yield {
                "ph": "X",
                "name": str(span.action),
                "cat": span.action.kind.row.name,
                "pid": process,
                "tid": stage,
                "ts": span.start * MICROSECONDS,
                "dur": span.seconds * MICROSECONDS,
                "args": {
                    "kind": described.kind,
                    "pipeline": described.pipeline,
                    "tokens": described.num_tokens,
                    "context": described.context,
                    "slices": list(described.slices),
                    "recomputed layers": span.layers,
                },
            }
            if span.recompute > 0:
                yield {
                    "ph": "X",
                    "name": "recompute",
                    "cat": "recompute",
                    "pid": process,
                    "tid": stage,
                    "ts": span.start * MICROSECONDS,
                    "dur": span.recompute * MICROSECONDS,
                }
    yield from _arrows(process, timeline)
    for stage, curve in enumerate(timeline.memory):
        for seconds, size in curve:
            yield {
                "ph": "C",
                "name": f"memory of stage {stage} (bytes)",
                "pid": process,
                "ts": seconds * MICROSECONDS,
                "args": {"bytes": size},
            }


def _metadata(name: str, process: int, arguments: dict[str, Any], thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}


def _arrows(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """A flow from the action that sends each message to the action that needs it."""
    makes, takes = timeline.messages_at
    for number, message in enumerate(timeline.messages):
        common = {"name": f"{message.direction} message", "cat": "message", "id": f"{process}.{number}", "pid": process}
        sender, receiver = makes[message.channel, message.chunk], takes[message.channel, message.chunk]
        computing = (sender.start + sender.recompute + sender.end) / 2
        yield common | {"ph": "s", "tid": message.source, "ts": computing * MICROSECONDS}
        yield common | {"ph": "f", "bp": "e", "tid": message.target, "ts": receiver.start * MICROSECONDS}
