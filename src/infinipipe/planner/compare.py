"""Planners side by side on one batch, against the ideal step that no planner can beat."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infinipipe.cost import AnalyticCost
from infinipipe.cost.network import Network
from infinipipe.plan import PlanError
from infinipipe.planner.baselines.unpiped import Cluster, flexsp, ulysses_zero3
from infinipipe.planner.registry import planner_names
from infinipipe.planner.search import Found
from infinipipe.planner.settings import PlannerSettings
from infinipipe.planner.step import plan_replica

UNPIPED = {"ulysses-zero3": ulysses_zero3, "flexsp": flexsp}


def ideal_seconds(cost: AnalyticCost, lengths: Sequence[int], token_capacity: int) -> float:
    """All tokens' forward and backward perfectly divided over all devices, at the fewest chunks possible (section 7)."""
    computing = cost.compute_seconds(lengths) / (cost.sequence_parallel * cost.num_stages)
    return computing + cost.chunk_seconds() / cost.num_stages * math.ceil(sum(lengths) / token_capacity)


@dataclass(frozen=True)
class Outcome:
    """What a planner makes of a batch; shares are of the ideal step, means over stages.

    Attributes:
        planner: its name.
        seconds: predicted step.
        over_ideal: that over the ideal.
        bubble, recompute, fixed: idle time, recompute, and fixed cost of chunks beyond the ideal's.
        chunks: their number.
        gap: of the recompute solver against its bound.
        planning_seconds: processor seconds that planning took.
        refusal: why there is no plan; all figures are NaN then.
    """

    planner: str
    seconds: float = math.nan
    over_ideal: float = math.nan
    bubble: float = math.nan
    recompute: float = math.nan
    fixed: float = math.nan
    chunks: int = 0
    gap: float = math.nan
    planning_seconds: float = math.nan
    refusal: str = ""


def compare(
    lengths: Sequence[int],
    cost: AnalyticCost,
    settings: PlannerSettings,
    planners: Iterable[str] | None = None,
    *,
    context: int | None = None,
    network: Network | None = None,
) -> list[Outcome]:
    """Run ``planners``, all if not given, on one replica's batch.

    Those without a pipeline run on ``network``, or what ``cost`` knows of it if not given. The ideal packs chunks to ``settings.token_capacity``, else to ``context``.
    """
    ideal = ideal_seconds(cost, lengths, settings.token_capacity or context or max(lengths))
    outcomes = []
    for name in (*planner_names(), *UNPIPED) if planners is None else planners:
        began = time.process_time()
        try:
            if name in UNPIPED:
                cluster = Cluster(cost, network or Network.of(cost), settings.memory_budget)
                seconds = UNPIPED[name](cluster, lengths)
                outcomes.append(Outcome(name, seconds, seconds / ideal, planning_seconds=time.process_time() - began))
                continue
            found = plan_replica(lengths, range(len(lengths)), cost, dataclasses.replace(settings, planner=name))
        except PlanError as error:
            outcomes.append(Outcome(name, refusal=str(error)))
            continue
        outcomes.append(_outcome(name, found, cost, ideal, lengths, time.process_time() - began))
    return outcomes


def _outcome(
    name: str, found: Found, cost: AnalyticCost, ideal: float, lengths: Sequence[int], planning_seconds: float
) -> Outcome:
    table, stages = found.draft.table, cost.num_stages
    recompute = float(table.recompute_seconds(found.recompute).sum()) / stages
    busy = float(table.forward_backward.sum()) / stages
    chunks = table.num_chunks
    computing = cost.compute_seconds(lengths) / (cost.sequence_parallel * stages)
    fixed = cost.chunk_seconds() / stages * chunks + computing
    return Outcome(
        planner=name,
        seconds=found.seconds,
        over_ideal=found.seconds / ideal,
        bubble=(found.seconds - busy - recompute) / ideal,
        recompute=recompute / ideal,
        fixed=(fixed - ideal) / ideal,
        chunks=chunks,
        gap=found.solution.gap if found.solution is not None else math.nan,
        planning_seconds=planning_seconds,
    )
