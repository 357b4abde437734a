"""What a plan's step is predicted to spend its time on."""

from __future__ import annotations

import math

from infinipipe.cost import CostModel
from infinipipe.plan import Plan
from infinipipe.simulate import simulate_plan


def predict_shares(plan: Plan, cost: CostModel) -> dict[str, float]:
    """Shares of the time of all devices in a step, which lasts as long as its slowest replica.

    ``bubble`` is idle time but for messages, ``messages`` idle time that waits for a link, ``recompute`` computing forwards again. A
    replica that is done is idle until the slowest is. Raises ``PlanError`` if the cost model is of other stages.
    """
    simulations = simulate_plan(plan, cost)
    seconds = max(simulation.makespan for simulation in simulations)
    stages = [stage for simulation in simulations for stage in simulation.stages]
    early = plan.num_stages * math.fsum(seconds - simulation.makespan for simulation in simulations)
    spent = {
        "bubble": early + math.fsum(stage.bubble for stage in stages),
        "messages": math.fsum(stage.communication for stage in stages),
        "recompute": math.fsum(stage.recompute for stage in stages),
    }
    whole = seconds * plan.num_stages * len(simulations)
    return {name: value / whole if whole else 0.0 for name, value in spent.items()}
