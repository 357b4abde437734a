"""Planners by name.

A planner is a function that searches for the plan of one replica::

    def plan(search: ReplicaSearch) -> Found:
        for num_slices in search.slice_counts():
            search.consider(search.draft([search.chunking(num_slices).ordered()]))
        return search.refine_best()

It is registered by name with :func:`register_planner`; a user's own is loaded from a Python file as ``path/to/file.py:function``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from infinipipe.plan import PlanError
from infinipipe.plan.loading import load_function

if TYPE_CHECKING:
    from infinipipe.planner.search import Found, ReplicaSearch

    Planner = Callable[[ReplicaSearch], Found]

_PLANNERS: dict[str, Planner] = {}


def register_planner(name: str) -> Callable[[Planner], Planner]:
    """Make a planner known under ``name``, in this process.

    Plans are also made in others (planning ahead, ``processes`` of :func:`infinipipe.planner.plan_step`); there, a planner of one's own
    is known by its path.
    """

    def register(planner: Planner) -> Planner:
        _PLANNERS[name] = planner
        return planner

    return register


def get_planner(name: str) -> Planner:
    """The planner of that name, or the function that ``path/to/file.py:function`` names. Raises ``PlanError``."""
    if name in _PLANNERS:
        return _PLANNERS[name]
    if ":" not in name:
        known = ", ".join(planner_names())
        raise PlanError(f"there is no planner {name!r}; use one of {known}, or path/to/file.py:function")
    return load_function(name, "planner")


def planner_names() -> list[str]:
    """The names of all registered planners, in alphabetical order."""
    return sorted(_PLANNERS)
