"""Settings of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infinipipe.plan import PlanError, get_schedule
from infinipipe.planner.registry import get_planner

GIB = 2**30
MOST_GIB = 2**20
"""The largest memory budget that a user can give."""
MOST_SLICES = 2**16
"""More slices than this take longer to plan than they can ever be worth."""
Recompute = Literal["auto", "none", "all"] | int


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """How to plan a step.

    Attributes:
        planner: name of the planner, or ``path/to/file.py:function``; see :mod:`infinipipe.planner.registry`.
        memory_budget: bytes of each device that a plan may use, model states included; unlimited if not given.
        token_capacity: most tokens of a chunk; unlimited if not given.
        max_slices: most slices into which the longest sequence is cut.
        num_slices: that number itself; searched if not given.
        recompute: ``auto`` fits the budget layer by layer; ``none``, ``all`` or a number of layers per stage are fixed.
        schedule: name of the schedule, or ``path/to/file.py:function``; ``auto`` is the planner's own choice.
        replicas: data-parallel replicas.
        time_limit: seconds after which the search returns its best plan so far; unlimited if not given.
        work_limit: most plans that the search tries for a replica; with it alone, equal inputs give equal plans.

    Raises ``PlanError`` for a value that cannot be, also for a planner or schedule that is not there or cannot be loaded.
    """

    planner: str = "elastic"
    memory_budget: int | None = None
    token_capacity: int | None = None
    max_slices: int = 32
    num_slices: int | None = None
    recompute: Recompute = "auto"
    schedule: str = "auto"
    replicas: int = 1
    time_limit: float | None = None
    work_limit: int = 64

    def __post_init__(self) -> None:
        try:
            get_planner(self.planner)
        except PlanError as error:
            raise PlanError(f"planner: {error}") from None
        try:
            if self.schedule != "auto":
                get_schedule(self.schedule)
        except PlanError as error:
            raise PlanError(f"schedule: {error}") from None
        for name in ("max_slices", "num_slices"):
            value = getattr(self, name)
            if value is not None and value > MOST_SLICES:
                raise PlanError(f"{name} is {value}; it must be at most {MOST_SLICES}")
        for name in ("memory_budget", "token_capacity", "max_slices", "num_slices", "replicas", "work_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                without = "; leave it out for no limit" if name in ("memory_budget", "token_capacity") else ""
                raise PlanError(f"{name} is {value}; it must be at least 1{without}")
        if self.time_limit is not None and self.time_limit <= 0:
            raise PlanError(f"time_limit is {self.time_limit}; it must be above 0 seconds")
        if isinstance(self.recompute, int) and not isinstance(self.recompute, bool):
            if self.recompute < 0:
                raise PlanError(f"recompute is {self.recompute} layers; it must be at least 0")
        elif self.recompute not in ("auto", "none", "all"):
            raise PlanError(f"recompute is {self.recompute!r}; it must be auto, none, all or a number of layers")


@dataclass(frozen=True, kw_only=True)
class PlannerChoices:
    """What a user chooses of :class:`PlannerSettings`, which has the defaults and refuses what cannot be.

    Attributes:
        planner: name of the planner, or path/to/file.py:function
        schedule: order of forwards and backwards: auto leaves it to the planner; 1f1b, gpipe, tapered, lookahead, interleaved, zero-bubble, or path/to/file.py:function
        memory_budget: GiB of each device for weights, gradients, optimizer states and activations; without limit if not given
        token_capacity: most tokens of a chunk; without limit if not given
        max_slices: most slices into which the longest sequence of a step may be cut
        num_slices: that number itself (K); if not given, the fastest up to max_slices is searched for
        recompute: layers of every stage that are computed again in backward: none, all, a number, which is all where a stage has fewer, or auto, which takes what the budget asks for
    """

    planner: str = PlannerSettings.planner
    schedule: str = PlannerSettings.schedule
    memory_budget: float | None = PlannerSettings.memory_budget
    token_capacity: int | None = PlannerSettings.token_capacity
    max_slices: int = PlannerSettings.max_slices
    num_slices: int | None = PlannerSettings.num_slices
    recompute: Recompute = PlannerSettings.recompute

    def planner_settings(self, *, replicas: int = 1, time_limit: float | None = None) -> PlannerSettings:
        """The planner's settings, in its units. Raises ``PlanError``."""
        if self.memory_budget is not None and not 0 < self.memory_budget <= MOST_GIB:
            raise PlanError(
                f"memory_budget is {self.memory_budget:g} GiB; it must be above 0 and at most {MOST_GIB}; leave it out for no limit"
            )
        return PlannerSettings(
            planner=self.planner,
            memory_budget=None if self.memory_budget is None else round(self.memory_budget * GIB),
            token_capacity=self.token_capacity,
            max_slices=self.max_slices,
            num_slices=self.num_slices,
            recompute=self.recompute,
            schedule=self.schedule,
            replicas=replicas,
            time_limit=time_limit,
        )
