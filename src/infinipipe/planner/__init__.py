"""From lengths, a cost model and a memory budget to a plan. Imports no torch."""

from infinipipe.planner.chunking import Chunking, SliceTime, balanced_chunking
from infinipipe.planner.forwards import plan_forwards
from infinipipe.planner.memory import BudgetError, check, replica_peaks
from infinipipe.planner.registry import get_planner, planner_names, register_planner
from infinipipe.planner.replicas import split_by_time
from infinipipe.planner.search import Found, ReplicaSearch
from infinipipe.planner.service import PlannerService, ServiceReport
from infinipipe.planner.settings import PlannerChoices, PlannerSettings
from infinipipe.planner.step import plan_replica, plan_step

from infinipipe.planner import baselines, elastic, paper  # isort: skip  # register their planners

__all__ = [
    "BudgetError",
    "Chunking",
    "Found",
    "PlannerChoices",
    "PlannerService",
    "PlannerSettings",
    "ReplicaSearch",
    "ServiceReport",
    "SliceTime",
    "balanced_chunking",
    "baselines",
    "check",
    "elastic",
    "get_planner",
    "paper",
    "plan_forwards",
    "plan_replica",
    "plan_step",
    "planner_names",
    "register_planner",
    "replica_peaks",
    "split_by_time",
]
