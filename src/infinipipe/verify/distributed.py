"""Exactness cases on real processes, in any layout."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from infinipipe.cost import GatherPolicy, GradientPolicy
from infinipipe.model import Stage
from infinipipe.runtime import (
    Executor,
    Layout,
    Mesh,
    Parameters,
    ShardedParameters,
    sync_shared_gradients,
)
from infinipipe.runtime.pool import WorkerPool, get_mesh
from infinipipe.verify.cases import Case, Outcome, compare, make_batch, make_stage, merge, precision, stage_gradients


def make_parameters(
    stage: Stage, mesh: Mesh, dtype: torch.dtype, policy: GatherPolicy, gradients: GradientPolicy
) -> Parameters:
    """Parameters of a stage, sharded where the layout has more than one process a stage."""
    sharding = mesh.sharding()
    if sharding is None:
        return Parameters(stage, dtype)
    return ShardedParameters(stage, sharding, dtype=dtype, policy=policy, gradients=gradients)


def run_stage(
    rank: int, case: Case, layout: Layout, policy: GatherPolicy, accumulate: GradientPolicy
) -> tuple[float, dict[str, Tensor]]:
    """One worker's part of a case; whole gradients come from the first process of every stage.

    With one replica, the replicas of the plan run in turn.
    """
    mesh = get_mesh(layout)
    if not mesh.is_member:
        return 0.0, {}
    stage = make_stage(case, mesh.stage)
    parameters = make_parameters(stage, mesh, getattr(torch, case.dtype), policy, accumulate)
    executor = Executor(stage, mesh.transport(), parameters, loss_block_tokens=case.loss_block_tokens, shard=mesh.shard)
    batch = make_batch(case)
    mine = case.plan.replicas if layout.replicas == 1 else [case.plan.replicas[mesh.replica]]
    with precision(case):
        loss = sum(executor.step(replica, batch).loss_sum for replica in mine)
    sync_shared_gradients(stage, parameters, mesh)
    gradients = {
        name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for name, gradient in stage_gradients(stage, parameters).items()
    }
    if stage.shared is not None and not stage.shared.is_owned:
        owner_has_it_all = gradients.pop(stage.shared.stored_as)
        assert owner_has_it_all.isfinite().all()
    return loss, gradients if mesh.replica == mesh.sequence == 0 else {}


def run_in_pool(
    pool: WorkerPool,
    case: Case,
    layout: Layout | None = None,
    *,
    policy: GatherPolicy = "keep",
    gradients: GradientPolicy = "whole",
) -> Outcome:
    """Run a case with a process for every place of the layout, by default one for every stage of the plan."""
    layout = layout or Layout(stages=case.plan.num_stages)
    layout = replace(layout, placement=case.plan.placement).for_heads(case.config.num_attention_heads)
    results = pool.run(run_stage, case, layout, policy, gradients)
    loss = sum(loss for loss, _ in results) / (make_batch(case).total_weight or 1.0)
    return compare(case, loss, merge([found for _, found in results]))
