"""Structural validation of plans: everything about a plan that can be proved without a cost model."""

from __future__ import annotations

from infinipipe.plan.kinds import KINDS, RESOURCES, ActionKind, Direction, Resource
from infinipipe.plan.types import Action, Chunk, Plan, PlanError, ReplicaPlan, Slice


def validate(plan: Plan) -> None:
    """Prove that ``plan`` computes its step and cannot deadlock. Raises ``PlanError`` at the first broken rule.

    The rules: every token of every sequence is in exactly one slice; a chunk has at most one slice of a cut sequence, and
    it comes first; every part lies on one stage; every chunk passes every part forward and backward once; slices of a sequence
    run forward in order and backward in reverse; an action finds what it needs, and nothing is left at the end; recomputed
    layers exist; sends and receives pair up in order and no stage waits for ever.
    """
    if not plan.stage_layers:
        raise PlanError("the plan has no stages; stage_layers must name at least one")
    for part, layers in enumerate(plan.stage_layers):
        if layers < 0:
            raise PlanError(f"{_unit(plan)} {part} has {layers} layers; a {_unit(plan)} has at least 0")
    for sequence, length in enumerate(plan.lengths):
        if length < 1:
            raise PlanError(f"sequence {sequence} has {length} tokens; a sequence has at least 1")
    if not plan.replicas:
        raise PlanError("the plan has no replicas; it needs at least one")
    _check_placement(plan)
    _check_coverage(plan)
    for index, replica in enumerate(plan.replicas):
        where = f"replica {index}: " if len(plan.replicas) > 1 else ""
        try:
            _check_replica(replica, plan)
        except PlanError as error:
            raise PlanError(where + str(error)) from None


def _unit(plan: Plan) -> str:
    """What ``stage_layers`` counts the layers of, in words."""
    return "stage" if plan.placement.is_plain else "part"


def _check_placement(plan: Plan) -> None:
    placement = plan.placement
    if (fault := placement.fault()) is not None:
        raise PlanError(fault)
    if placement.num_parts != len(plan.stage_layers):
        raise PlanError(
            f"there are action lists for {placement.num_stages} stages, but the plan has {len(plan.stage_layers)}"
            if placement.is_plain
            else f"the placement names {placement.num_parts} parts, but stage_layers has {len(plan.stage_layers)} entries"
        )
    for index, replica in enumerate(plan.replicas):
        if replica.placement != placement:
            raise PlanError(f"replica {index} places parts otherwise than replica 0; all replicas have one placement")


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
                    fault = "overlaps" if piece.start < reached[sequence] else "leaves a gap after"
                    raise PlanError(
                        f"chunk {number}: {piece} {fault} its earlier slices, which end at {reached[sequence]}"
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


def _check_replica(replica: ReplicaPlan, plan: Plan) -> None:
    num_stages, num_chunks, unit = replica.num_stages, len(replica.chunks), _unit(plan)
    if len(replica.actions) != num_stages:
        raise PlanError(f"there are action lists for {len(replica.actions)} stages, but the plan has {num_stages}")
    if len(replica.recompute) != plan.num_parts:
        raise PlanError(f"recompute has {len(replica.recompute)} rows, but the plan has {plan.num_parts} {unit}s")
    for number, pipeline in enumerate(replica.pipelines):
        if not pipeline.chunks:
            raise PlanError(f"pipeline {number} has no chunks")
    for part, row in enumerate(replica.recompute):
        if len(row) != num_chunks:
            raise PlanError(f"recompute of {unit} {part} names {len(row)} chunks, but there are {num_chunks}")
        for chunk, layers in enumerate(row):
            if not 0 <= layers <= plan.stage_layers[part]:
                raise PlanError(
                    f"{unit} {part} recomputes {layers} layers of chunk {chunk}, but it has {plan.stage_layers[part]} layers"
                )
    check_actions(replica)


def check_actions(replica: ReplicaPlan) -> None:
    """Prove that the action lists compute all chunks, in an order that runs. Raises ``PlanError`` at the first broken rule."""
    program = replica.program
    parts = program.part.tolist()
    for stage, actions in enumerate(replica.actions):
        ledger = _Ledger(stage, replica.chunks, replica.placement.parts[stage])
        for action, part in zip(actions, parts[program.base[stage] : program.base[stage + 1]], strict=True):
            ledger.add(action, part)
        ledger.close()
    program.check_messages()
    _ = program.order


class _Ledger:
    """What one stage's actions have done so far, and what they hold."""

    def __init__(self, stage: int, chunks: tuple[Chunk, ...], parts: tuple[int, ...]) -> None:
        self._stage, self._chunks, self._parts = stage, chunks, parts
        self._passed: dict[Direction, set[tuple[int, int]]] = {direction: set() for direction in Direction}
        self._reached: dict[tuple[Direction, int, int], int] = {}
        self._held: dict[str, set[tuple[int, int]]] = {resource.name: set() for resource in RESOURCES}
        self._gone: dict[str, set[tuple[int, int]]] = {resource.name: set() for resource in RESOURCES}

    def _fault(self, action: Action, what: str) -> PlanError:
        return PlanError(f"stage {self._stage}, action {action}: {what}")

    def add(self, action: Action, part: int) -> None:
        """Account an action at ``part``. Raises ``PlanError``."""
        row, place = action.kind.row, (part, action.chunk)
        if action.part not in (None, part):
            raise self._fault(action, f"the stage has part {part} alone")
        at = "" if len(self._parts) == 1 else f" at part {part}"
        if row.flow is not None:
            if place in self._passed[row.flow]:
                raise self._fault(action, f"the chunk went {row.flow.value} already{at}")
            self._passed[row.flow].add(place)
        for resource in row.releases:
            if resource.is_per_sequence:
                continue
            if place not in self._held[resource.name]:
                gone = place in self._gone[resource.name]
                makers = " or ".join(f"{kind.value}{action.chunk}" for kind in _acquiring(resource))
                raise self._fault(
                    action,
                    f"the {resource.name} of the chunk "
                    + (f"were released before{at}" if gone else f"are not there{at}; it comes after {makers}"),
                )
            self._held[resource.name].remove(place)
            self._gone[resource.name].add(place)
        for resource in row.acquires:
            if not resource.is_per_sequence:
                self._held[resource.name].add(place)
        if row.flow is not None and (piece := self._chunks[action.chunk].partial) is not None:
            self._check_slice(row.flow, action, part, piece)

    def _check_slice(self, flow: Direction, action: Action, part: int, piece: Slice) -> None:
        """Slices of a sequence run forward in order and backward in reverse."""
        key = (flow, part, piece.sequence)
        if flow is Direction.FORWARD:
            begins, ends, reached = piece.start, piece.stop, self._reached.get(key, 0)
        else:
            begins, ends, reached = piece.stop, piece.start, self._reached.get(key, piece.length)
        if begins != reached:
            rule = (
                f"runs forward when its sequence stands at {reached}; slices run forward in order"
                if flow is Direction.FORWARD
                else "runs backward before a later slice of its sequence; slices run backward in reverse, after the forward of "
                "the last one"
            )
            raise self._fault(action, f"{piece} {rule}")
        self._reached[key] = ends

    def close(self) -> None:
        """Raise ``PlanError`` unless every chunk has passed in both directions and nothing is held."""
        wanted = {(part, chunk) for part in self._parts for chunk in range(len(self._chunks))}
        for direction, passed in self._passed.items():
            if missing := wanted - passed:
                part, chunk = min(missing)
                at = "" if len(self._parts) == 1 else f" at part {part}"
                raise PlanError(f"stage {self._stage} never runs chunk {chunk} {direction.value}{at}")
        for resource in RESOURCES:
            if places := self._held[resource.name]:
                chunk = min(places)[1]
                enders = " or ".join(f"{kind.value}{chunk}" for kind, row in KINDS.items() if resource in row.releases)
                raise PlanError(
                    f"stage {self._stage} never releases the {resource.name} of chunk {chunk}; {enders} is missing"
                )


def _acquiring(resource: Resource) -> list[ActionKind]:
    return [kind for kind, row in KINDS.items() if resource in row.acquires]
