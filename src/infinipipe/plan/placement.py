"""Which parts of the model lie on which stage.

A *part* is a contiguous run of layers (the field's *virtual stage*); a *stage* is what one process, or the processes that share its
tokens, holds. With one part on every stage they are the same::

    plain           interleaved       v-shaped
    stage 0: 0      stage 0: 0 2      stage 0: 0 3     embedding and head on one stage
    stage 1: 1      stage 1: 1 3      stage 1: 1 2     part 1 hands over to part 2 without a message
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """The parts of every stage, in the order in which activations pass through them."""

    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def plain(cls, num_stages: int) -> Placement:
        """One part on every stage."""
        return cls(tuple((stage,) for stage in range(num_stages)))

    @classmethod
    def interleaved(cls, num_stages: int, parts_per_stage: int = 2) -> Placement:
        """Part ``k`` on stage ``k mod num_stages``."""
        last = num_stages * parts_per_stage
        return cls(tuple(tuple(range(stage, last, num_stages)) for stage in range(num_stages)))

    @classmethod
    def v_shaped(cls, num_stages: int, parts_per_stage: int = 2) -> Placement:
        """There and back: parts on stages 0, 1, ..., and from the last stage back to the first, as often as it takes."""
        runs = [
            range(run * num_stages, (run + 1) * num_stages)[:: 1 if run % 2 == 0 else -1]
            for run in range(parts_per_stage)
        ]
        return cls(tuple(zip(*runs, strict=True)))

    @property
    def num_stages(self) -> int:
        return len(self.parts)

    @cached_property
    def num_parts(self) -> int:
        return sum(map(len, self.parts))

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of every part."""
        stages = {part: stage for stage, parts in enumerate(self.parts) for part in parts}
        return tuple(stages[part] for part in range(self.num_parts))

    @cached_property
    def is_plain(self) -> bool:
        return self.parts == tuple((stage,) for stage in range(self.num_stages))

    def fault(self) -> str | None:
        """Why this is no placement, if so: every part lies on one stage, and a stage lists its parts in order."""
        if not self.parts:
            return "the placement names no stage"
        found = sorted(part for parts in self.parts for part in parts)
        if found != list(range(len(found))):
            return f"the placement {[list(parts) for parts in self.parts]} must name every part from 0 on exactly once"
        for stage, parts in enumerate(self.parts):
            if not parts:
                return f"the placement leaves stage {stage} without a part"
            if list(parts) != sorted(parts):
                return f"the placement names the parts {list(parts)} of stage {stage}; they must ascend"
        return None

    def describe(self, stage: int) -> str:
        """A stage in words, with its parts where it has several."""
        parts = self.parts[stage]
        return f"stage {stage}" if len(parts) == 1 else f"stage {stage} (parts {', '.join(map(str, parts))})"


PLACEMENTS: Mapping[str, Callable[[int, int], Placement]] = {
    "interleaved": Placement.interleaved,
    "v": Placement.v_shaped,
}
"""Placements of several parts on each stage, by name, from the number of stages and of parts on each."""


def placement_named(name: str, num_stages: int, parts_per_stage: int) -> Placement:
    """The placement of that name: ``plain`` or one of ``PLACEMENTS``. Raises ``ValueError``."""
    if name == "plain":
        if parts_per_stage != 1:
            raise ValueError(f"a plain placement has 1 part on each stage, not {parts_per_stage}; use interleaved or v")
        return Placement.plain(num_stages)
    if name not in PLACEMENTS:
        raise ValueError(f"there is no placement {name!r}; use one of plain, {', '.join(PLACEMENTS)}")
    if parts_per_stage < 2:
        raise ValueError(f"the placement {name} needs at least 2 parts on each stage, not {parts_per_stage}")
    return PLACEMENTS[name](num_stages, parts_per_stage)


ONE_EACH = Placement(())
"""Stands for one part on each stage where their number is known otherwise."""
