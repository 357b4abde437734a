"""Structural validation of plans: everything about a plan that can be proved without a cost model."""

from __future__ import annotations

from infinipipe.plan.communication import check_deadlock
from infinipipe.plan.types import Action, ActionKind, Chunk, Plan, PlanError, ReplicaPlan


def validate(plan: Plan) -> None:
    """Prove that ``plan`` computes its step and cannot deadlock. Raises ``PlanError`` at the first broken rule.

    The rules: every token of every sequence is in exactly one slice; a chunk has at most one slice of a cut sequence, and
    it comes first; every chunk runs forward and backward once on every stage; slices of a sequence run forward in order and
    backward in reverse; recomputed layers exist; sends and receives pair up in order and no stage waits for ever.
    """
    if not plan.stage_layers:
        raise PlanError("the plan has no stages; stage_layers must name at least one")
    for stage, layers in enumerate(plan.stage_layers):
        if layers < 0:
            raise PlanError(f"stage {stage} has {layers} layers; a stage has at least 0")
    for sequence, length in enumerate(plan.lengths):
        if length < 1:
            raise PlanError(f"sequence {sequence} has {length} tokens; a sequence has at least 1")
    if not plan.replicas:
        raise PlanError("the plan has no replicas; it needs at least one")
    _check_coverage(plan)
    for index, replica in enumerate(plan.replicas):
        where = f"replica {index}: " if len(plan.replicas) > 1 else ""
        try:
            _check_replica(replica, plan.stage_layers)
        except PlanError as error:
            raise PlanError(where + str(error)) from None


def _check_coverage(plan: Plan) -> None:
    """Every sequence lies in one replica, cut into contiguous slices that cover it once, in the order of its chunks."""
    reached = [0] * len(plan.lengths)
    home: list[int | None] = [None] * len(plan.lengths)
    for index, replica in enumerate(plan.replicas):
        for number, chunk in enumerate(replica.chunks):
            _check_chunk(number, chunk)
            for piece in chunk.slices:
                sequence = piece.sequence
                if not 0 <= sequence < len(plan.lengths):
                    raise PlanError(f"chunk {number} names sequence {sequence}; the batch has {len(plan.lengths)}")
                if piece.length != plan.lengths[sequence]:
                    raise PlanError(
                        f"chunk {number} gives sequence {sequence} {piece.length} tokens; it has {plan.lengths[sequence]}"
                    )
                if home[sequence] is None:
                    home[sequence] = index
                elif home[sequence] != index:
                    raise PlanError(
                        f"sequence {sequence} is in replicas {home[sequence]} and {index}; it must stay in one"
                    )
                if piece.start != reached[sequence]:
                    problem = "overlaps" if piece.start < reached[sequence] else "leaves a gap after"
                    raise PlanError(
                        f"chunk {number}: {piece} {problem} its earlier slices, which end at {reached[sequence]}"
                    )
                reached[sequence] = piece.stop
    for sequence, (end, length) in enumerate(zip(reached, plan.lengths, strict=True)):
        if end != length:
            raise PlanError(f"sequence {sequence} has {length} tokens, but its slices cover {end}")


def _check_chunk(number: int, chunk: Chunk) -> None:
    if not chunk.slices:
        raise PlanError(f"chunk {number} has no slices")
    for place, piece in enumerate(chunk.slices):
        if not 0 <= piece.start < piece.stop <= piece.length:
            raise PlanError(f"chunk {number}: {piece} must have 0 <= start < stop <= its length")
        if place > 0 and not piece.is_whole:
            raise PlanError(
                f"chunk {number}: {piece} is part of a cut sequence at place {place}; a chunk has at most one such slice, "
                "and it comes first"
            )


def _check_replica(replica: ReplicaPlan, stage_layers: tuple[int, ...]) -> None:
    num_stages, num_chunks = len(stage_layers), len(replica.chunks)
    if len(replica.actions) != num_stages:
        raise PlanError(f"there are action lists for {len(replica.actions)} stages, but the plan has {num_stages}")
    if len(replica.recompute) != num_stages:
        raise PlanError(f"recompute has {len(replica.recompute)} rows, but the plan has {num_stages} stages")
    for number, pipeline in enumerate(replica.pipelines):
        if not pipeline.chunks:
            raise PlanError(f"pipeline {number} has no chunks")
    for stage, row in enumerate(replica.recompute):
        if len(row) != num_chunks:
            raise PlanError(f"recompute of stage {stage} names {len(row)} chunks, but there are {num_chunks}")
        for chunk, layers in enumerate(row):
            if not 0 <= layers <= stage_layers[stage]:
                raise PlanError(
                    f"stage {stage} recomputes {layers} layers of chunk {chunk}, but it has {stage_layers[stage]} layers"
                )
    for stage, actions in enumerate(replica.actions):
        _check_actions(stage, actions, replica.chunks)
    check_deadlock(replica)


def _check_actions(stage: int, actions: tuple[Action, ...], chunks: tuple[Chunk, ...]) -> None:
    forwarded: set[int] = set()
    done: set[int] = set()
    forward_end: dict[int, int] = {}
    backward_start: dict[int, int] = {}
    for action in actions:
        where = f"stage {stage}, action {action}"
        if action.chunk >= len(chunks):
            raise PlanError(f"{where}: there are {len(chunks)} chunks, numbered from 0")
        piece = chunks[action.chunk].partial
        if action.kind == ActionKind.FORWARD:
            if action.chunk in forwarded:
                raise PlanError(f"{where}: the chunk was forwarded already")
            forwarded.add(action.chunk)
            if piece is not None:
                reached = forward_end.get(piece.sequence, 0)
                if piece.start != reached:
                    raise PlanError(
                        f"{where}: {piece} runs forward when its sequence stands at {reached}; slices run forward in order"
                    )
                forward_end[piece.sequence] = piece.stop
        else:
            if action.chunk not in forwarded:
                raise PlanError(f"{where}: the chunk has not been forwarded")
            if action.chunk in done:
                raise PlanError(f"{where}: the chunk's backward was done already")
            done.add(action.chunk)
            if piece is not None:
                if piece.stop != backward_start.get(piece.sequence, piece.length):
                    raise PlanError(
                        f"{where}: {piece} runs backward before a later slice of its sequence; "
                        "slices run backward in reverse, after the forward of the last one"
                    )
                backward_start[piece.sequence] = piece.start
    missing = set(range(len(chunks))) - done
    if missing:
        raise PlanError(f"stage {stage} never runs the backward of chunk {min(missing)}")
