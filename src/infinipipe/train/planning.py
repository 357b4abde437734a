"""Plans for steps, as the settings ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from infinipipe.cost import AnalyticCost, CostError, ModelShape, flop_cost, state_bytes
from infinipipe.cost.files import load_cost
from infinipipe.plan import Plan
from infinipipe.planner import PlannerSettings, plan_step
from infinipipe.train.settings import Settings

GIB = 2**30
ADAMW_BYTES = 16
"""A float32 parameter with its gradient and two moments."""
GRADIENT_BYTES = 4
"""Gradients accumulate in float32 over a step."""


def states_of(settings: Settings, shape: ModelShape, stage_layers: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of the model's states on one device of every stage, at the most of a step.

    Where the processes of a stage share its states, each holds its part of them, all gradients until the step's last backward
    and the gathered weights: all if they are kept, those of the largest part of the stage if they are released.
    """
    parallel = settings.parallel
    itemsize: int = getattr(torch, settings.model.dtype).itemsize
    if parallel.sequence_parallel * parallel.replicas == 1:
        copies = itemsize if itemsize < GRADIENT_BYTES else 0
        return state_bytes(shape, stage_layers, bytes_per_parameter=ADAMW_BYTES + copies)
    own = state_bytes(shape, stage_layers, bytes_per_parameter=ADAMW_BYTES, shards=parallel.sequence_parallel)
    keeps = parallel.gather_policy == "keep"
    whole = state_bytes(shape, stage_layers, bytes_per_parameter=GRADIENT_BYTES + (itemsize if keeps else 0))
    gathered = 0 if keeps else max(shape.layer_weights, shape.embedding_weights) * itemsize
    return tuple(mine + all_of_it + gathered for mine, all_of_it in zip(own, whole, strict=True))


class StepPlanner:
    """Plans steps on the cost file of the settings, or on a cost model that follows from the model's shape.

    Attributes:
        cost: that model.
        settings: the planner's settings.

    Raises ``ValueError`` for settings that the planner refuses, and for a model whose shape it cannot read.
    """

    def __init__(self, settings: Settings, config: PretrainedConfig, stage_layers: tuple[int, ...]) -> None:
        plan = settings.plan
        dtype: torch.dtype = getattr(torch, settings.model.dtype)
        shape = ModelShape.from_config(config.to_dict())
        states = states_of(settings, shape, stage_layers)
        if plan.cost:
            self.cost = _measured_cost(settings, stage_layers, states)
        else:
            self.cost = flop_cost(
                shape,
                stage_layers,
                element_bytes=dtype.itemsize,
                flops_per_second=plan.flops_per_second,
                chunk_seconds=plan.chunk_seconds,
                sequence_parallel=settings.parallel.sequence_parallel,
                states=states,
                block_tokens=settings.train.loss_block_tokens,
            )
        self.settings = PlannerSettings(
            planner=plan.planner,
            memory_budget=round(plan.memory_budget * GIB) or None,
            token_capacity=plan.token_capacity or None,
            max_slices=plan.max_slices,
            num_slices=plan.num_slices or None,
            recompute=plan.recompute,
            schedule=plan.schedule,
            replicas=settings.parallel.replicas,
        )

    def plan(self, lengths: Sequence[int]) -> Plan:
        """The plan of a step over sequences of ``lengths`` tokens, proved valid. Raises ``PlanError``."""
        plan = plan_step(lengths, self.cost, self.settings)
        plan.validate()
        return plan


def _measured_cost(settings: Settings, stage_layers: tuple[int, ...], states: tuple[int, ...]) -> AnalyticCost:
    """The cost file of the settings, with the states of this run. Raises ``CostError`` if it is of another layout."""
    cost = load_cost(settings.plan.cost)
    if cost.stage_layers != stage_layers:
        raise CostError(
            f"plan.cost {settings.plan.cost} describes stages of {list(cost.stage_layers)} layers, but the run has "
            f"{list(stage_layers)}; profile this layout"
        )
    if cost.sequence_parallel != settings.parallel.sequence_parallel:
        raise CostError(
            f"plan.cost {settings.plan.cost} is of sequence_parallel {cost.sequence_parallel}, but the run has "
            f"{settings.parallel.sequence_parallel}; profile this layout"
        )
    return dataclasses.replace(cost, states=states)
