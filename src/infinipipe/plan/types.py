"""The vocabulary of Elastic Pipeline Parallelism: slices, chunks, pipelines, plans."""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from infinipipe.plan.kinds import ActionKind
from infinipipe.plan.placement import ONE_EACH, Placement

if TYPE_CHECKING:
    from infinipipe.plan.program import Program


class PlanError(ValueError):
    """A plan that breaks a rule; the message names the place and the rule."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The tokens ``[start, stop)`` of one sequence.

    ``sequence`` is the index of the sequence in the global batch and ``length`` its number of tokens.
    """

    sequence: int
    start: int
    stop: int
    length: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether the slice is its whole sequence."""
        return self.start == 0 and self.stop == self.length

    @property
    def is_tail(self) -> bool:
        """Whether the slice is the last one of a sequence that was cut."""
        return self.start > 0 and self.stop == self.length

    def __str__(self) -> str:
        return f"sequence {self.sequence} [{self.start}, {self.stop}) of {self.length}"


class ChunkKind(enum.StrEnum):
    """What a chunk is made of; it follows from the chunk's slices."""

    SPLIT = "split"
    BATCHED = "batched"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A micro-batch: at most one slice of a cut sequence, which comes first, then whole sequences."""

    slices: tuple[Slice, ...]

    @property
    def context(self) -> int:
        """Tokens of the first slice's sequence that earlier chunks have processed (``C`` of Eq. 1)."""
        return self.slices[0].start

    @property
    def num_tokens(self) -> int:
        return sum(piece.stop - piece.start for piece in self.slices)

    @property
    def partial(self) -> Slice | None:
        """The slice of a cut sequence, if the chunk has one."""
        return None if self.slices[0].is_whole else self.slices[0]

    @property
    def kind(self) -> ChunkKind:
        if self.partial is None:
            return ChunkKind.BATCHED
        return ChunkKind.SPLIT if len(self.slices) == 1 else ChunkKind.HYBRID


@dataclass(frozen=True, slots=True)
class Pipeline:
    """An ordered set of chunks run as one pass; gradients accumulate over the pipelines of a step."""

    chunks: tuple[Chunk, ...]

    @property
    def num_splits(self) -> int:
        """Number of chunks of the most finely cut sequence (``N_split`` of the paper); 1 if none is cut."""
        return num_splits(self.chunks)


def num_splits(chunks: Iterable[Chunk]) -> int:
    """Number of chunks of the most finely cut sequence among ``chunks``; 1 if none is cut."""
    return max(map(len, cut_sequences(chunks).values()), default=1)


def cut_sequences(chunks: Iterable[Chunk]) -> dict[int, list[int]]:
    """For every cut sequence, in order of appearance, the places in ``chunks`` of those that hold its slices, in order."""
    found: dict[int, list[int]] = {}
    for index, chunk in enumerate(chunks):
        if (piece := chunk.partial) is not None:
            found.setdefault(piece.sequence, []).append(index)
    return found


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a stage's action list.

    Attributes:
        kind: what is computed.
        chunk: for which chunk, counted over all pipelines of the replica.
        part: at which part of the model; ``None`` is the only part of the stage.
    """

    kind: ActionKind
    chunk: int
    part: int | None = None

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}" if self.part is None else f"{self.kind.value}{self.chunk}@{self.part}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the form that ``str`` writes: ``F12``, or ``F12@5`` at part 5. Raises ``PlanError``."""
        match = re.fullmatch(r"([A-Z])([0-9]{1,9})(?:@([0-9]{1,9}))?", text) if isinstance(text, str) else None
        if match is None or match[1] not in set(ActionKind):
            raise PlanError(
                f"action {str(text)[:40]!r} is not a letter of {', '.join(ActionKind)} followed by a chunk number, "
                "such as F12, and perhaps a part, such as F12@5"
            )
        return cls(ActionKind(match[1]), int(match[2]), None if match[3] is None else int(match[3]))


def Forward(chunk: int, part: int | None = None) -> Action:  # noqa: N802
    """The forward pass of a chunk."""
    return Action(ActionKind.FORWARD, chunk, part)


def Backward(chunk: int, part: int | None = None) -> Action:  # noqa: N802
    """The backward pass of a chunk, recompute included."""
    return Action(ActionKind.BACKWARD, chunk, part)


def BackwardInput(chunk: int, part: int | None = None) -> Action:  # noqa: N802
    """The first half of a backward: all but the gradients of linear layers' weights; recompute included."""
    return Action(ActionKind.BACKWARD_INPUT, chunk, part)


def BackwardWeight(chunk: int, part: int | None = None) -> Action:  # noqa: N802
    """The second half: the gradients of linear layers' weights. No other stage waits for it."""
    return Action(ActionKind.BACKWARD_WEIGHT, chunk, part)


ActionLists = tuple[tuple[Action, ...], ...]
"""One action list per stage."""


@dataclass(frozen=True)
class ReplicaPlan:
    """What one data-parallel replica does in a step.

    Attributes:
        pipelines: the chunks in order; chunk numbers count through all pipelines.
        actions: for every stage, what it computes, in order.
        recompute: ``recompute[part][chunk]`` is how many of the part's layers, counted from its first, drop their activations
            in the chunk's forward and compute them again in its backward.
        placement: the parts of every stage; if not given, each has one.
    """

    pipelines: tuple[Pipeline, ...]
    actions: ActionLists
    recompute: tuple[tuple[int, ...], ...]
    placement: Placement = ONE_EACH

    def __post_init__(self) -> None:
        if not self.placement.parts:
            object.__setattr__(self, "placement", Placement.plain(len(self.actions)))

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(chunk for pipeline in self.pipelines for chunk in pipeline.chunks)

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_parts(self) -> int:
        return self.placement.num_parts

    @cached_property
    def program(self) -> Program:
        """What the action lists need and hold. Raises ``PlanError`` for a chunk or part that is not there."""
        from infinipipe.plan.program import Program

        return Program(self.actions, self.chunks, self.placement)


@dataclass(frozen=True)
class Plan:
    """How one optimizer step is run: a plan for every data-parallel replica.

    Attributes:
        stage_layers: number of decoder layers of every part, which is every stage where each has one part.
        lengths: tokens of every sequence of the global batch.
        replicas: one entry per data-parallel replica; an entry may be without chunks.
        metadata: what the planner says of the plan (name, predictions); no part of its hash.
    """

    stage_layers: tuple[int, ...]
    lengths: tuple[int, ...]
    replicas: tuple[ReplicaPlan, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def placement(self) -> Placement:
        """The parts of every stage, the same for all replicas."""
        return self.replicas[0].placement if self.replicas else Placement.plain(len(self.stage_layers))

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_parts(self) -> int:
        return len(self.stage_layers)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def all_chunks(self) -> Iterator[Chunk]:
        for replica in self.replicas:
            yield from replica.chunks

    def validate(self) -> None:
        """Prove that the plan runs and computes the step. Raises ``PlanError`` at the first broken rule."""
        from infinipipe.plan.validate import validate

        validate(self)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of what the plan does, metadata excluded; equal plans have equal hashes."""
        from infinipipe.plan.serialize import plan_hash

        return plan_hash(self)


def whole(lengths: Sequence[int], sequences: Iterable[int]) -> tuple[Slice, ...]:
    """The given sequences as whole slices."""
    return tuple(Slice(i, 0, lengths[i], lengths[i]) for i in sequences)


def cut(sequence: int, length: int, borders: Iterable[int]) -> tuple[Slice, ...]:
    """Cut a sequence at inner ``borders``, ascending and inside ``(0, length)``, into contiguous slices."""
    edges = [0, *borders, length]
    return tuple(Slice(sequence, a, b, length) for a, b in itertools.pairwise(edges))
