"""From lengths, a cost model and a memory budget to a plan. Imports no torch."""

from infinipipe.planner.chunking import Chunking, SliceTime, balanced_chunking
from infinipipe.planner.memory import BudgetError, check, replica_peaks
from infinipipe.planner.replicas import split_by_time
from infinipipe.planner.service import PlannerService, ServiceReport
from infinipipe.planner.settings import PlannerSettings
from infinipipe.planner.step import PLANNERS, plan_replica, plan_step

__all__ = [
    "PLANNERS",
    "BudgetError",
    "Chunking",
    "PlannerService",
    "PlannerSettings",
    "ServiceReport",
    "SliceTime",
    "balanced_chunking",
    "check",
    "plan_replica",
    "plan_step",
    "replica_peaks",
    "split_by_time",
]
