"""Schedules: functions from chunks to one action list per stage.

A schedule knows only order. It is registered by name with :func:`register_schedule`; a user's own is loaded from a
Python file as ``path/to/file.py:function``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infinipipe.plan.loading import load_function
from infinipipe.plan.placement import Placement
from infinipipe.plan.types import (
    Action,
    ActionLists,
    Backward,
    Chunk,
    Forward,
    Pipeline,
    PlanError,
    ReplicaPlan,
    num_splits,
)
from infinipipe.plan.validate import check_actions

Schedule = Callable[[Sequence[Sequence[Chunk]], Placement, Sequence[int] | None], Sequence[Sequence[Action]]]
"""``schedule(pipelines, placement, warmup)`` returns a list of actions for every stage.

``pipelines`` holds the chunks of each pipeline; actions number the chunks through all pipelines. ``placement`` says how many stages
there are, and which parts of the model each has; actions need not name a part where every stage has one. ``warmup`` is, for every
stage, how many forwards come before its first backward at the least, or ``None`` for the schedule's own choice.
"""

_SCHEDULES: dict[str, Schedule] = {}


def register_schedule(name: str) -> Callable[[Schedule], Schedule]:
    """Make a schedule known under ``name``."""

    def register(schedule: Schedule) -> Schedule:
        _SCHEDULES[name] = schedule
        return schedule

    return register


def get_schedule(name: str) -> Schedule:
    """The schedule of that name, or the function that ``path/to/file.py:function`` names. Raises ``PlanError``."""
    if name in _SCHEDULES:
        return _SCHEDULES[name]
    if ":" not in name:
        known = ", ".join(sorted(_SCHEDULES))
        raise PlanError(f"there is no schedule {name!r}; use one of {known}, or path/to/file.py:function")
    return _checked(load_function(name, "schedule"), name)


def _checked(schedule: Schedule, name: str) -> Schedule:
    """A schedule that raises ``PlanError`` if it returns no action lists."""

    def checked(
        pipelines: Sequence[Sequence[Chunk]], placement: Placement, warmup: Sequence[int] | None = None
    ) -> Sequence[Sequence[Action]]:
        lists = schedule(pipelines, placement, warmup)
        try:
            good = len(lists) == placement.num_stages and all(isinstance(a, Action) for row in lists for a in row)
        except TypeError:
            good = False
        if not good:
            raise PlanError(
                f"the schedule {name} must return one list of actions, such as [Forward(0), Backward(0)], for each of the "
                f"{placement.num_stages} stages"
            )
        return lists

    return checked


def backward_order(chunks: Sequence[Chunk]) -> list[int]:
    """Indices of ``chunks`` in backward order (``f2b`` of section III-C).

    Sequences keep the order of their first forward; the chunks of one sequence come in reverse.
    """
    groups: dict[int, list[int]] = {}
    for index, chunk in enumerate(chunks):
        piece = chunk.partial
        groups.setdefault(-1 - index if piece is None else piece.sequence, []).append(index)
    return [index for group in groups.values() for index in reversed(group)]


def default_warmup(chunks: Sequence[Chunk], num_stages: int) -> list[int]:
    """Forwards before the first backward, per stage: ``min(n, d_p - p + N_split - 1)`` with ``p`` from 1."""
    splits = num_splits(chunks)
    return [min(len(chunks), num_stages - stage - 2 + splits) for stage in range(num_stages)]


@register_schedule("1f1b")
def one_forward_one_backward(
    pipelines: Sequence[Sequence[Chunk]], placement: Placement, warmup: Sequence[int] | None = None
) -> list[list[Action]]:
    """1F1B over chunks that may be slices: warm-up forwards, then a forward and a backward in turn, then the rest.

    A backward whose chunk has not been forwarded (a sequence cut more finely than those before it) waits for further
    forwards, so any order of chunks is legal. A warm-up shorter than needed is lengthened for the same reason.
    """
    require_one_part(placement, "1f1b")
    lists: list[list[Action]] = [[] for _ in range(placement.num_stages)]
    first = 0
    for chunks in pipelines:
        order = backward_order(chunks)
        forwards = warmup if warmup is not None else default_warmup(chunks, placement.num_stages)
        for stage, actions in enumerate(lists):
            done = 0
            for position, chunk in enumerate(order):
                while done < len(chunks) and (done <= chunk or done < forwards[stage] + position + 1):
                    actions.append(Forward(first + done))
                    done += 1
                actions.append(Backward(first + chunk))
        first += len(chunks)
    return lists


@register_schedule("gpipe")
def gpipe(
    pipelines: Sequence[Sequence[Chunk]], placement: Placement, warmup: Sequence[int] | None = None
) -> Sequence[Sequence[Action]]:
    """All forwards of a pipeline, then all its backwards: 1F1B whose warm-up is the whole of it."""
    require_one_part(placement, "gpipe")
    return one_forward_one_backward(pipelines, placement, [sum(map(len, pipelines))] * placement.num_stages)


def require_one_part(placement: Placement, name: str) -> None:
    """Raise ``PlanError`` if a schedule that knows no parts is asked to schedule several on a stage."""
    if placement.num_parts != placement.num_stages:
        raise PlanError(
            f"the schedule {name} has one part of the model on each stage; use interleaved or zero-bubble for a placement of "
            f"{placement.num_parts} parts on {placement.num_stages} stages"
        )


def build_replica(
    pipelines: Sequence[Pipeline],
    stages: int | Placement,
    *,
    schedule: str = "1f1b",
    warmup: Sequence[int] | None = None,
    recompute: Sequence[Sequence[int]] | None = None,
) -> ReplicaPlan:
    """Schedule ``pipelines`` over ``stages``, their number or which parts of the model each has.

    ``recompute[part][chunk]`` is 0 throughout if not given. Raises ``PlanError``, also for a schedule from a user's file whose action
    lists cannot run.
    """
    placement = Placement.plain(stages) if isinstance(stages, int) else stages
    if warmup is not None and len(warmup) != placement.num_stages:
        raise PlanError(f"warmup names {len(warmup)} stages, but there are {placement.num_stages}")
    num_chunks = sum(len(pipeline.chunks) for pipeline in pipelines)
    lists = get_schedule(schedule)([pipeline.chunks for pipeline in pipelines], placement, warmup)
    actions: ActionLists = tuple(tuple(actions) for actions in lists)
    if recompute is None:
        recompute = [[0] * num_chunks for _ in range(placement.num_parts)]
    replica = ReplicaPlan(tuple(pipelines), actions, tuple(tuple(row) for row in recompute), placement)
    if schedule not in _SCHEDULES:
        try:
            check_actions(replica)
        except PlanError as error:
            raise PlanError(f"what the schedule {schedule} returns cannot run: {error}") from None
    return replica
