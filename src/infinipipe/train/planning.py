"""Plans for steps, as the settings ask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from infinipipe.cost import ModelShape, flop_cost, state_bytes
from infinipipe.plan import Plan
from infinipipe.planner import PlannerSettings, plan_step
from infinipipe.train.settings import Settings

GIB = 2**30
ADAMW_BYTES = 16
"""A float32 parameter with its gradient and two moments."""


class StepPlanner:
    """Plans every step on a cost model that follows from the model's shape.

    Raises ``ValueError`` for settings that the planner refuses, and for a model whose shape it cannot read.
    """

    def __init__(self, settings: Settings, config: PretrainedConfig, stage_layers: tuple[int, ...]) -> None:
        plan = settings.plan
        dtype: torch.dtype = getattr(torch, settings.model.dtype)
        shape = ModelShape.from_config(config.to_dict())
        copies = dtype.itemsize if dtype != torch.float32 else 0
        self._cost = flop_cost(
            shape,
            stage_layers,
            element_bytes=dtype.itemsize,
            flops_per_second=plan.flops_per_second,
            chunk_seconds=plan.chunk_seconds,
            states=state_bytes(shape, stage_layers, bytes_per_parameter=ADAMW_BYTES + copies),
            block_tokens=settings.train.loss_block_tokens,
        )
        self._settings = PlannerSettings(
            planner=plan.planner,
            memory_budget=round(plan.memory_budget * GIB) or None,
            token_capacity=plan.token_capacity or None,
            max_slices=plan.max_slices,
            num_slices=plan.num_slices or None,
            recompute=plan.recompute,
            schedule=plan.schedule,
        )

    def plan(self, lengths: Sequence[int]) -> Plan:
        """The plan of a step over sequences of ``lengths`` tokens, proved valid. Raises ``PlanError``."""
        plan = plan_step(lengths, self._cost, self._settings)
        plan.validate()
        return plan
