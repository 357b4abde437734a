"""Planning ahead: plans of coming steps are made in other processes while the current step trains."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from types import TracebackType

from infinipipe.cost import CostModel
from infinipipe.plan import Plan, PlanError
from infinipipe.planner.settings import PlannerSettings
from infinipipe.planner.step import plan_step

QUICK_TRIES = 3
"""Work limit of the plan that is made on the spot when the ordered one is late."""


@dataclass
class ServiceReport:
    """What the service has done so far.

    Attributes:
        planned: plans that came from a worker.
        late: steps for which a quick plan was made because the worker's was late.
        lost: steps for which one was made because the workers had died.
        waited_seconds: for each plan, how long its taker waited.
        planning_seconds: for each plan from a worker, how long it took to make.
    """

    planned: int = 0
    late: int = 0
    lost: int = 0
    waited_seconds: list[float] = field(default_factory=list)
    planning_seconds: list[float] = field(default_factory=list)


class PlannerService:
    """Plans steps in worker processes. Steps are ordered by number, any number ahead, and taken once each.

    Args:
        cost, settings: as for :func:`infinipipe.planner.plan_step`; both are sent to the workers.
        workers: processes; as many steps are planned at once.
        patience: seconds that taking a plan waits for a worker before a quick plan is made instead. Without patience
            (``None``) taking waits for as long as it takes: with no ``time_limit`` in the settings the plans then depend
            on nothing but the lengths.

    The workers start afresh (no forked state) and import no torch.
    """

    def __init__(
        self, cost: CostModel, settings: PlannerSettings, *, workers: int = 1, patience: float | None = None
    ) -> None:
        if workers < 1:
            raise PlanError(f"the number of planner workers is {workers}; it must be at least 1")
        self.report = ServiceReport()
        self._cost, self._settings, self._workers, self._patience = cost, settings, workers, patience
        self._ordered: dict[int, tuple[tuple[int, ...], Future[Plan]]] = {}
        self._pool = self._start()

    def order(self, step: int, lengths: Sequence[int]) -> None:
        """Begin to plan a step over sequences of ``lengths`` tokens."""
        if step in self._ordered:
            raise PlanError(f"step {step} is being planned already")
        try:
            future = self._pool.submit(plan_step, tuple(lengths), self._cost, self._settings)
        except BrokenExecutor:
            self._pool = self._start()
            future = self._pool.submit(plan_step, tuple(lengths), self._cost, self._settings)
        self._ordered[step] = (tuple(lengths), future)

    def take(self, step: int) -> Plan:
        """The plan of an ordered step. Raises what planning it raised, such as ``BudgetError``."""
        if step not in self._ordered:
            raise PlanError(f"step {step} was not ordered; order it before taking it")
        lengths, future = self._ordered.pop(step)
        began = time.perf_counter()
        try:
            plan = future.result(timeout=self._patience)
            self.report.planned += 1
            self.report.planning_seconds.append(float(plan.metadata["planning_seconds"]))
        except FutureTimeoutError:
            future.cancel()
            self.report.late += 1
            plan = self._quick(lengths)
        except BrokenExecutor:
            self._pool = self._start()
            self.report.lost += 1
            plan = self._quick(lengths)
        self.report.waited_seconds.append(time.perf_counter() - began)
        return plan

    def close(self) -> None:
        """Stop the workers; what they plan is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ordered.clear()

    def __enter__(self) -> PlannerService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._workers, mp_context=context, initializer=_end_with_parent)

    def _quick(self, lengths: Sequence[int]) -> Plan:
        settings = dataclasses.replace(self._settings, work_limit=QUICK_TRIES, time_limit=None)
        return plan_step(lengths, self._cost, settings)


def _end_with_parent() -> None:
    """Let this worker end when the process that started it has died without saying so."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
