"""Plans for forwards alone."""

from __future__ import annotations

import random

import pytest
import torch

from infinipipe.cost import flop_cost
from infinipipe.model import build_stage
from infinipipe.planner import BudgetError, PlannerSettings, plan_forwards, plan_step
from infinipipe.runtime import Batch, Executor, MemoryMeter, Parameters, connect
from infinipipe.runtime.footprint import footprint
from infinipipe.verify.families import FAMILIES

CONFIG = FAMILIES["llama"](hidden_size=64, intermediate_size=192, vocab_size=500, num_hidden_layers=4)
KNOWN = footprint(CONFIG, torch.float32)
COST = flop_cost(
    KNOWN.shape, (4,), element_bytes=4, states=[0], block_tokens=16, layers=KNOWN.layers, flops_per_second=1e9
)


@pytest.mark.parametrize("capacity", [None, 64, 700])
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_token_is_in_one_chunk_within_the_capacity(capacity: int | None, replicas: int) -> None:
    lengths = [1, 137, 2041, 5, 64, 65]
    plan = plan_forwards(lengths, COST, PlannerSettings(token_capacity=capacity, replicas=replicas))
    plan.validate()
    assert plan.num_tokens == sum(lengths)
    most = max(chunk.num_tokens for replica in plan.replicas for chunk in replica.chunks)
    assert most <= (capacity or max(lengths))


def test_what_does_not_fit_as_a_backward_may_fit_as_a_forward_and_holds_no_more_than_promised() -> None:
    lengths, budget = [1500, 90, 700], 3_000_000
    with pytest.raises(BudgetError):
        plan_step(lengths, COST, PlannerSettings(memory_budget=budget))
    plan = plan_forwards(lengths, COST, PlannerSettings(memory_budget=budget))
    stage = build_stage(CONFIG, (4,), 0)
    executor = Executor(stage, connect(1)[0], Parameters(stage), loss_block_tokens=16)
    rng = random.Random(0)
    batch = Batch.from_tokens([torch.tensor(rng.choices(range(500), k=length)) for length in lengths])
    with MemoryMeter() as meter:
        loss = executor.evaluate(plan.replicas[0], batch).loss_sum
    assert meter.peak <= budget
    whole = plan_forwards(lengths, COST, PlannerSettings())
    assert len(whole.replicas[0].chunks) < len(plan.replicas[0].chunks)
    assert executor.evaluate(whole.replicas[0], batch).loss_sum == pytest.approx(loss, rel=1e-5)


def test_keys_and_values_that_are_too_much_alone_are_refused() -> None:
    with pytest.raises(BudgetError, match="use more stages, raise memory_budget or evaluate shorter sequences"):
        plan_forwards([100_000], COST, PlannerSettings(memory_budget=3_000_000))
