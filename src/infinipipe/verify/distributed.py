"""Exactness cases on real processes."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist

from infinipipe.runtime import (
    Executor,
    Parameters,
    PipelineGroups,
    ProcessGroupTransport,
    pair_groups,
    sync_tied_gradients,
)
from infinipipe.verify.cases import Case, Outcome, compare, make_batch, make_stage, merge, precision, stage_gradients
from infinipipe.verify.pool import WorkerPool


@lru_cache(maxsize=8)
def connections(num_stages: int) -> tuple[ProcessGroupTransport | None, PipelineGroups]:
    """Communicators of the first ``num_stages`` ranks, made once for a worker's life; a collective of all ranks."""
    ranks = range(num_stages)
    pairs, groups = pair_groups([ranks]), PipelineGroups.create([ranks])
    return (ProcessGroupTransport(ranks, pairs) if dist.get_rank() < num_stages else None), groups


def run_stage(rank: int, case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    """One worker's part of a case: the stage of its rank, if there is one, for all replicas of the plan in turn."""
    transport, groups = connections(case.plan.num_stages)
    if transport is None:
        return 0.0, {}
    stage = make_stage(case, rank)
    parameters = Parameters(stage)
    executor = Executor(stage, transport, parameters, loss_block_tokens=case.loss_block_tokens)
    batch = make_batch(case)
    with precision(case):
        loss = sum(executor.step(replica, batch).loss_sum for replica in case.plan.replicas)
    sync_tied_gradients(stage, parameters, groups)
    gradients = stage_gradients(stage, parameters)
    if stage.tied and stage.is_last and not stage.is_first:
        first_has_it_all = gradients.pop("model.embed_tokens.weight")
        assert first_has_it_all.isfinite().all()
    return loss, gradients


def run_in_pool(pool: WorkerPool, case: Case) -> Outcome:
    """Run a case with a process for every stage and compare with the plain model in this process."""
    results = pool.run(run_stage, case)
    num_supervised = max(1, make_batch(case).num_supervised)
    loss = sum(loss for loss, _ in results) / num_supervised
    return compare(case, loss, merge([gradients for _, gradients in results]))
