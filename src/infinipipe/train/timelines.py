"""Timelines of chosen steps: as measured, and as the planner's cost model predicts them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinipipe.cost import CostModel
from infinipipe.files import write_beside
from infinipipe.plan import Plan
from infinipipe.plan import save as save_plan
from infinipipe.runtime import Event
from infinipipe.simulate import simulate_plan
from infinipipe.timeline import measured_timeline, save
from infinipipe.timeline.figure import draw
from infinipipe.timeline.page import html_page
from infinipipe.timeline.svg import to_svg


@dataclass(frozen=True)
class StageEvents:
    """What one process recorded of a step, and its place in the layout."""

    replica: int
    stage: int
    sequence: int
    events: list[Event]


def write_timelines(
    folder: Path, step: int, plan: Plan, cost: CostModel, recorded: Sequence[StageEvents], budget: int | None
) -> None:
    """Write a step's plan, and for every replica its predicted and its measured timeline, and both as page and picture.

    Of the devices of a stage, the first one's events are shown. Clocks of different machines are taken as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{step:06d}"
    save_plan(plan, folder / f"{name}.plan.json")
    predictions = simulate_plan(plan, cost, budget=budget)
    for index, (replica, prediction) in enumerate(zip(plan.replicas, predictions, strict=True)):
        events: list[list[Event]] = [[] for _ in range(plan.num_stages)]
        for part in recorded:
            if part.replica == index and part.sequence == 0:
                events[part.stage] = part.events
        memory = [
            [sample for event in row for sample in _memory(event, cost.state_bytes(stage))]
            for stage, row in enumerate(events)
        ]
        title = f"step {step}" + (f", replica {index}" if len(plan.replicas) > 1 else "")
        measured = measured_timeline(replica, events, memory=memory, budget=budget, name=f"{title}, measured")
        suffix = f".replica-{index}" if len(plan.replicas) > 1 else ""
        save(measured, folder / f"{name}{suffix}.measured.json")
        predicted = dataclasses.replace(prediction.timeline, name=f"{title}, predicted")
        save(predicted, folder / f"{name}{suffix}.predicted.json")
        both = [predicted, measured]
        write_beside(folder / f"{name}{suffix}.html", html_page(both, title=title).encode())
        write_beside(folder / f"{name}{suffix}.svg", to_svg(draw(both)).encode())


def _memory(event: Event, states: int) -> list[tuple[float, int]]:
    """Bytes in use during an action, its peak taken for the whole of it, and after it."""
    return [(event.start, states + event.peak), (event.end, states + event.after)]
