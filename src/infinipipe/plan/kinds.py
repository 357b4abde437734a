"""What can be done with a chunk at a part of the model: every kind of action as a row of one table.

A row says which way an action passes through the pipeline, what it holds from when on, what it lets go of, and which column
of the cost model it takes. Everything that follows from action lists reads the rows, through
:class:`infinipipe.plan.program.Program`: a new kind is a new row here, a column of the cost model, and a method of the executor.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Direction(enum.StrEnum):
    """Which way a message goes: activations to the next part, gradients to the previous one."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Occasion(enum.Enum):
    """Whose action acquires or releases a resource: every chunk's, or that of a cut sequence's first or last slice alone."""

    EVERY_CHUNK = enum.auto()
    FIRST_SLICE = enum.auto()
    LAST_SLICE = enum.auto()


@dataclass(frozen=True)
class Resource:
    """Memory that actions hold between each other, at every part.

    Attributes:
        name: in words; also the key of its size in the cost table.
        acquired, released: whose actions do; those of a cut sequence's slices hold one for the sequence.
        from_end: whether it is held from the end of the action that acquires it; what that action needs of it while it runs
            is in the action's transient then. Else it is held from the action's start.
    """

    name: str
    acquired: Occasion = Occasion.EVERY_CHUNK
    released: Occasion = Occasion.EVERY_CHUNK
    from_end: bool = False

    @property
    def is_per_sequence(self) -> bool:
        return self.acquired is not Occasion.EVERY_CHUNK


ACTIVATIONS = Resource("activations")
KEYS_VALUES = Resource("keys and values", Occasion.FIRST_SLICE, Occasion.FIRST_SLICE)
"""Of a cut sequence, from its first slice's forward until that slice's own backward, the sequence's last one, is done."""
KV_GRADIENTS = Resource("gradients of keys and values", Occasion.LAST_SLICE, Occasion.FIRST_SLICE)
WEIGHT_OPERANDS = Resource("operands of weight gradients", from_end=True)
"""Inputs and output gradients of linear layers, between the two halves of a backward."""

RESOURCES = (ACTIVATIONS, KEYS_VALUES, KV_GRADIENTS, WEIGHT_OPERANDS)


@dataclass(frozen=True)
class Row:
    """One kind of action.

    Attributes:
        name: in words.
        flow: which way it passes through the pipeline: it needs the message of the part before, in that direction, and makes one
            for the part after. ``None``: it neither needs nor makes one.
        acquires, releases: resources that it begins, and ends, to hold.
        cost: column of the cost table with its seconds and its transient bytes.
        half_of: the column of the action of which it is one half, if it is.
        keeps_input: whether its input is part of what it acquires; else the message is held until the action ends.
        recomputes: whether it computes again first what the forward has dropped, if no action before it has.
    """

    name: str
    flow: Direction | None
    acquires: tuple[Resource, ...]
    releases: tuple[Resource, ...]
    cost: str
    half_of: str | None = None
    keeps_input: bool = False
    recomputes: bool = False

    @property
    def leaves_behind(self) -> bool:
        """Whether something piles up while it runs that it holds when it ends."""
        return any(resource.from_end for resource in self.acquires)


class ActionKind(enum.StrEnum):
    """What is computed for a chunk; the value is the letter that stands for it in plans."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    @property
    def row(self) -> Row:
        return KINDS[self]


KINDS: dict[ActionKind, Row] = {
    ActionKind.FORWARD: Row(
        name="forward",
        flow=Direction.FORWARD,
        acquires=(ACTIVATIONS, KEYS_VALUES),
        releases=(),
        cost="forward",
        keeps_input=True,
    ),
    ActionKind.BACKWARD: Row(
        name="backward",
        flow=Direction.BACKWARD,
        acquires=(KV_GRADIENTS,),
        releases=(ACTIVATIONS, KEYS_VALUES, KV_GRADIENTS),
        cost="backward",
        recomputes=True,
    ),
    ActionKind.BACKWARD_INPUT: Row(
        name="backward of the input",
        flow=Direction.BACKWARD,
        acquires=(KV_GRADIENTS, WEIGHT_OPERANDS),
        releases=(ACTIVATIONS, KEYS_VALUES, KV_GRADIENTS),
        cost="backward_input",
        half_of="backward",
        recomputes=True,
    ),
    ActionKind.BACKWARD_WEIGHT: Row(
        name="backward of the weights",
        flow=None,
        acquires=(),
        releases=(WEIGHT_OPERANDS,),
        cost="backward_weight",
        half_of="backward",
    ),
}
"""The table. ``B`` is ``I`` and ``W`` in one; whatever is in ``I`` but not in ``W`` (norms, embeddings, attention) is in ``B``."""

COLUMNS = tuple(row.cost for row in KINDS.values())
"""The columns of a cost table, in the order of the kinds."""
