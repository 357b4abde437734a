"""Planning ahead in other processes: the same plans, quick ones when late, errors passed on, dead workers replaced."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from infinipipe.cost import AnalyticCost, ModelShape, flop_cost
from infinipipe.plan import Chunk
from infinipipe.planner import BudgetError, PlannerService, PlannerSettings, plan_step

SHAPE = ModelShape(layers=4, hidden=64, intermediate=192, heads=8, kv_heads=4, head_dim=8, vocab=500)
COST = flop_cost(SHAPE, (2, 2), element_bytes=4, flops_per_second=1e9)
LENGTHS = [900, 300, 200, 40, 7]


class SlowCost(AnalyticCost):
    """A cost model that takes its time once in a worker process, and not here."""

    def table(self, chunks: Sequence[Chunk]):  # type: ignore[no-untyped-def]
        if os.environ.get("PLANNED_BY") not in (str(os.getpid()), "anyone"):
            time.sleep(1.5)
            os.environ["PLANNED_BY"] = "anyone"
        return super().table(chunks)


def test_plans_from_workers_equal_those_made_here() -> None:
    settings = PlannerSettings(max_slices=4)
    with PlannerService(COST, settings) as service:
        batches = [LENGTHS, LENGTHS[1:], [50]]
        for step, lengths in enumerate(batches):
            service.order(step, lengths)
        plans = [service.take(step) for step in range(3)]
    assert [plan.hash for plan in plans] == [plan_step(lengths, COST, settings).hash for lengths in batches]
    assert service.report.planned == 3
    assert len(service.report.planning_seconds) == 3


def test_an_impossible_budget_reaches_the_taker() -> None:
    with PlannerService(COST, PlannerSettings(memory_budget=1000)) as service:
        service.order(0, LENGTHS)
        with pytest.raises(BudgetError, match="stage") as caught:
            service.take(0)
    assert caught.value.required > 1000


def test_a_late_plan_is_replaced_by_a_valid_quick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNED_BY", str(os.getpid()))
    cost = SlowCost(**{name: getattr(COST, name) for name in COST.__dataclass_fields__})
    with PlannerService(cost, PlannerSettings(max_slices=4), patience=0.1) as service:
        service.order(7, LENGTHS)
        plan = service.take(7)
    plan.validate()
    assert (service.report.planned, service.report.late) == (0, 1)


def test_a_dead_worker_costs_one_quick_plan() -> None:
    with PlannerService(COST, PlannerSettings(max_slices=4)) as service:
        service.order(0, LENGTHS)
        service.take(0)
        for process in list(service._pool._processes.values()):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        service.order(1, LENGTHS)
        service.take(1).validate()
        service.order(2, LENGTHS)
        service.take(2).validate()
    assert service.report.planned + service.report.lost == 3
    assert service.report.planned >= 2


def test_planning_imports_no_torch() -> None:
    code = "import sys, infinipipe.planner.service, infinipipe.planner.compare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
