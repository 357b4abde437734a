"""Which plans to measure: a few chunks each, spread evenly over sizes, contexts, packing and recompute. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinipipe.plan import Chunk, Pipeline, Plan, build_replica, cut, whole
from infinipipe.settings import SettingError, require_range

SHORTEST = 16
"""Tokens of the shortest packed sequence."""
SPLIT = 2
"""Every so many plans, one has its backwards in two halves."""


@dataclass(frozen=True)
class Design:
    """The region that is measured.

    Attributes:
        longest: tokens of the longest sequence.
        capacity: most tokens of a chunk of whole sequences.
        smallest: tokens of the smallest slice.
        max_slices: most slices of a sequence.
        num_plans: how many plans.
    """

    longest: int = 8192
    capacity: int = 4096
    smallest: int = 128
    max_slices: int = 8
    num_plans: int = 24

    def __post_init__(self) -> None:
        require_range("smallest", self.smallest, at_least=SHORTEST)
        require_range("max_slices", self.max_slices, at_least=1)
        require_range("plans", self.num_plans, at_least=8)
        for name in ("longest", "capacity"):
            if getattr(self, name) < 2 * self.smallest:
                raise SettingError(f"{name} must be at least twice the smallest slice, {2 * self.smallest} tokens")

    def plans(self, stage_layers: Sequence[int]) -> list[Plan]:
        """The plans, each of one sequence that may be cut and one chunk of packed sequences, for these stages."""
        return [self._plan(index, stage_layers) for index in range(1, self.num_plans + 1)]

    def _plan(self, index: int, stage_layers: Sequence[int]) -> Plan:
        size, slices, packed, count, mixed = (halton(index, base) for base in (2, 3, 5, 7, 11))
        length = round(2 * self.smallest * (self.longest / (2 * self.smallest)) ** size)
        num_slices = min(1 + int(slices * self.max_slices), length // self.smallest)
        total = round(self.smallest * (self.capacity / self.smallest) ** packed)
        num_packed = round((total / SHORTEST) ** count)
        lengths = (length, *_uneven(total, num_packed))
        pieces = cut(0, length, [length * i // num_slices for i in range(1, num_slices)])
        shorts = whole(lengths, range(1, len(lengths)))
        if mixed < 0.5 and num_slices > 1:
            chunks = (*(Chunk((piece,)) for piece in pieces[:-1]), Chunk((pieces[-1], *shorts)))
        else:
            chunks = (*(Chunk((piece,)) for piece in pieces), Chunk(shorts))
        rows = [[layers if (index + chunk) % 3 == 0 else 0 for chunk in range(len(chunks))] for layers in stage_layers]
        schedule = "zero-bubble" if index % SPLIT == 0 else "1f1b"
        replica = build_replica([Pipeline(chunks)], len(stage_layers), schedule=schedule, recompute=rows)
        plan = Plan(tuple(stage_layers), lengths, (replica,))
        plan.validate()
        return plan


def _uneven(total: int, count: int) -> list[int]:
    """``count`` lengths that rise from half of the mean to one and a half of it."""
    return [max(1, round(total / count * (0.5 + (i + 0.5) / count))) for i in range(count)]


def halton(index: int, base: int) -> float:
    """Number ``index``, from 1, of Halton's sequence in a prime base: points in (0, 1) that fill it evenly."""
    value, scale = 0.0, 1.0
    while index > 0:
        scale /= base
        index, digit = divmod(index, base)
        value += scale * digit
    return value
