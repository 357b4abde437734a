"""Plans for steps, as the settings ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from infinipipe.cost import (
    AnalyticCost,
    CostError,
    Holding,
    ModelShape,
    balanced_stages,
    flop_cost,
    optimizer_moments,
    state_bytes,
)
from infinipipe.cost.files import load_cost
from infinipipe.cost.policies import with_policies
from infinipipe.plan import Plan
from infinipipe.planner import plan_forwards, plan_step
from infinipipe.runtime.footprint import footprint
from infinipipe.settings import SettingError
from infinipipe.train.settings import ParallelSettings, Settings


def holding_of(settings: Settings) -> Holding:
    """How the processes of a stage hold its states."""
    parallel, optimizer = settings.parallel, settings.optimizer
    return Holding(
        element_bytes=getattr(torch, settings.model.dtype).itemsize,
        sequence_parallel=parallel.sequence_parallel,
        replicas=parallel.replicas,
        gather_policy=parallel.gather_policy,
        gradient_policy=parallel.gradient_policy,
        moments=len(optimizer_moments(optimizer.name, optimizer.momentum)),
    )


class StepPlanner:
    """Plans steps on the cost file of the settings, or on a cost model that follows from the model's shape.

    Where the settings do not say how many layers a part has, the cost file does, and where there is none, parts are
    balanced for sequences of ``length`` tokens.

    Attributes:
        cost: that model.
        settings: the planner's settings.
        shape: of the model.

    Raises ``ValueError`` for settings that the planner refuses or that do not fit the model, and for a model whose shape it
    cannot read.
    """

    def __init__(self, settings: Settings, config: PretrainedConfig, length: int) -> None:
        plan = settings.plan
        dtype: torch.dtype = getattr(torch, settings.model.dtype)
        known = footprint(config, dtype)
        self.shape = shape = known.shape
        given = _given_layers(settings.parallel, shape)
        if plan.cost:
            cost = _measured_cost(settings, shape, given)
        else:
            cost = flop_cost(
                shape,
                given or balanced_stages(shape, settings.parallel.placed.num_parts, length),
                element_bytes=dtype.itemsize,
                flops_per_second=plan.flops_per_second,
                chunk_seconds=plan.chunk_seconds,
                sequence_parallel=settings.parallel.sequence_parallel,
                block_tokens=settings.train.loss_block_tokens,
                placement=settings.parallel.placed,
                layers=known.layers,
            )
        holding = holding_of(settings)
        states = state_bytes(shape, cost.stage_layers, cost.placement, holding)
        self.cost = dataclasses.replace(with_policies(cost, shape, holding), states=states)
        self.settings = plan.planner_settings(replicas=settings.parallel.replicas)

    def plan(self, lengths: Sequence[int]) -> Plan:
        """The plan of a step over sequences of ``lengths`` tokens, proved valid. Raises ``PlanError``."""
        plan = plan_step(lengths, self.cost, self.settings)
        plan.validate()
        return plan

    def plan_forwards(self, lengths: Sequence[int]) -> Plan:
        """A plan for the forwards of ``lengths`` alone, proved valid. Raises ``PlanError``."""
        plan = plan_forwards(lengths, self.cost, self.settings)
        plan.validate()
        return plan


def _given_layers(parallel: ParallelSettings, shape: ModelShape) -> tuple[int, ...] | None:
    """Layers of every part if the settings say. Raises ``SettingError`` if the model has no such parts."""
    given, stages, parts = parallel.stage_layers, parallel.stages, parallel.placed.num_parts
    if given is None:
        if parts > shape.layers:
            count = f"parallel.stages is {stages}" + (f", of {parts // stages} parts each" if parts > stages else "")
            raise SettingError(
                f"{count}, but the model has {shape.layers} layers; use at most {shape.layers} "
                + ("parts" if parts > stages else "stages")
            )
        return None
    if len(given) != parts or sum(given) != shape.layers or min(given) < 0:
        raise SettingError(
            f"parallel.stage_layers {given} must name {parts} counts that sum to the model's {shape.layers} layers"
        )
    return tuple(given)


def _traits(shape: ModelShape) -> dict[str, int]:
    """What a model must have in common with the one that a cost file was made for."""
    names = ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab")
    windows = {f"window of layer {layer}": shape.layer_window(layer) for layer in range(shape.layers)}
    return {name: getattr(shape, name) for name in names} | windows


def _measured_cost(settings: Settings, shape: ModelShape, given: tuple[int, ...] | None) -> AnalyticCost:
    """The cost file of the settings, with its own states. Raises ``CostError`` if it is of another layout or model."""
    cost, parallel = load_cost(settings.plan.cost), settings.parallel
    described = f"plan.cost {settings.plan.cost} describes stages of {list(cost.stage_layers)} layers"
    if cost.num_stages == parallel.stages and cost.placement != parallel.placed:
        raise CostError(
            f"plan.cost {settings.plan.cost} places the parts {[list(parts) for parts in cost.placement.parts]} on its stages, the "
            f"run {[list(parts) for parts in parallel.placed.parts]}; profile this placement"
        )
    if (cost.num_stages, sum(cost.stage_layers)) != (parallel.stages, shape.layers):
        raise CostError(
            f"{described}, but the run has parallel.stages {parallel.stages} and a model of {shape.layers} layers; "
            "profile this layout"
        )
    if given is not None and given != cost.stage_layers:
        raise CostError(
            f"{described}, but parallel.stage_layers is {list(given)}; leave that out, or profile this layout"
        )
    if cost.sequence_parallel != parallel.sequence_parallel:
        raise CostError(
            f"plan.cost {settings.plan.cost} is of sequence_parallel {cost.sequence_parallel}, but the run has "
            f"{parallel.sequence_parallel}; profile this layout"
        )
    if cost.shape is not None:
        theirs = _traits(cost.shape)
        for name, value in _traits(shape).items():
            if theirs[name] != value:
                raise CostError(
                    f"plan.cost {settings.plan.cost} describes a model whose {name} is {theirs[name]}, but that of the run "
                    f"is {value}; profile this model, or remove plan.cost"
                )
    return cost
