"""Timelines of simulated and measured steps: one format, and pictures of it. Imports no torch."""

from infinipipe.timeline.breakdown import StageTime, breakdown
from infinipipe.timeline.events import (
    MeasuredEvent,
    MemoryCurve,
    Message,
    Source,
    Span,
    Timeline,
    TimelineError,
    from_json,
    load,
    measured_timeline,
    save,
    to_json,
)

__all__ = [
    "MeasuredEvent",
    "MemoryCurve",
    "Message",
    "Source",
    "Span",
    "StageTime",
    "Timeline",
    "TimelineError",
    "breakdown",
    "from_json",
    "load",
    "measured_timeline",
    "save",
    "to_json",
]
