"""Exactness cases: a model, a batch and a plan, run in stages and compared with the plain model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from infinipipe.model import Stage, build_stage
from infinipipe.plan import ChunkKind, Placement, Plan
from infinipipe.runtime import Batch, Executor, Parameters, connect, step_locally
from infinipipe.verify.reference import float64_kept, plain_model, reference_step, relative_error


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        config: of a model small enough for float64 on one core.
        plan: the plan to run; its ``stage_layers`` must sum to the model's layers.
        dtype: ``float64``, ``float32`` or ``bfloat16``.
        seed: of weights, tokens and masks.
        masked: share of sequences whose first two thirds (a prompt) are not supervised; one of them is masked whole.
        weighted: whether sequences count differently in the loss.
    """

    config: PretrainedConfig
    plan: Plan
    dtype: str = "float64"
    seed: int = 0
    masked: float = 0.0
    weighted: bool = False
    loss_block_tokens: int = 16


@dataclass(frozen=True)
class Outcome:
    """Errors of a case as contract 3 of the architecture defines them, and what the plan exercised."""

    gradient_error: float
    loss_difference: float
    features: frozenset[str]


def make_batch(case: Case) -> Batch:
    """The batch of a case: random tokens, prompts masked, sequences weighted."""
    rng, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    vocabulary = case.config.vocab_size
    tokens = [torch.randint(0, vocabulary, (n,), generator=generator) for n in case.plan.lengths]
    supervised = [torch.ones(n, dtype=torch.bool) for n in case.plan.lengths]
    chosen = [i for i in range(len(tokens)) if rng.random() < case.masked]
    for i in chosen:
        supervised[i][: 2 * len(tokens[i]) // 3] = False
    if chosen:
        supervised[chosen[0]][:] = False
    batch = Batch.from_tokens(tokens, supervised)
    if not case.weighted:
        return batch
    return Batch(tokens, batch.labels, [torch.full((n,), rng.uniform(0.1, 3)) for n in case.plan.lengths])


def make_stage(case: Case, index: int) -> Stage:
    """Stage ``index`` of a case's model, in the precision of its master weights."""
    dtype = torch.promote_types(getattr(torch, case.dtype), torch.float32)
    parts = case.plan.placement.parts[index]
    return build_stage(case.config, case.plan.stage_layers, parts, dtype=dtype, seed=case.seed)


def precision(case: Case) -> Any:
    """The context in which both sides of a float64 case run."""
    return float64_kept() if case.dtype == "float64" else nullcontext()


def stage_gradients(stage: Stage, parameters: Parameters) -> dict[str, Tensor]:
    """A stage's gradients; the head's copy of a shared weight appears as a share of the embedding's gradient."""
    return {
        stage.stored_name(name): parameter.grad for name, parameter in parameters.named() if parameter.grad is not None
    }


def merge(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Gradients of all stages and replicas; those of one name are summed."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def compare(case: Case, loss: float, gradients: Mapping[str, Tensor]) -> Outcome:
    """Set a staged result beside the plain model's."""
    layers = (case.config.num_hidden_layers,)
    whole = build_stage(case.config, layers, 0, dtype=getattr(torch, case.dtype), seed=case.seed)
    model = plain_model(case.config, whole.model.state_dict(), getattr(torch, case.dtype))
    with precision(case):
        expected_loss, expected = reference_step(model, make_batch(case))
    return Outcome(relative_error(gradients, expected), abs(loss - expected_loss), features(case))


def run_locally(case: Case, prepare: Callable[[Executor], None] | None = None) -> Outcome:
    """Run a case with all stages in this process; ``prepare`` may change the executors before."""
    batch = make_batch(case)
    parts, loss = [], 0.0
    for replica in case.plan.replicas:
        executors, stages = [], [make_stage(case, index) for index in range(case.plan.num_stages)]
        for stage, transport in zip(stages, connect(case.plan.num_stages), strict=True):
            executors.append(
                Executor(
                    stage,
                    transport,
                    Parameters(stage, getattr(torch, case.dtype)),
                    loss_block_tokens=case.loss_block_tokens,
                )
            )
            if prepare is not None:
                prepare(executors[-1])
        with precision(case):
            results = step_locally(executors, replica, batch)
        loss += sum(result.loss_sum for result in results)
        parts += [
            stage_gradients(stage, executor.parameters) for stage, executor in zip(stages, executors, strict=True)
        ]
    return compare(case, loss / (batch.total_weight or 1.0), merge(parts))


def features(case: Case) -> frozenset[str]:
    """What a case exercises, by name."""
    plan, found = case.plan, set()
    batch = make_batch(case)
    placement = plan.placement
    if case.config.tie_word_embeddings and placement.stage_of[0] != placement.stage_of[-1]:
        found.add("tied embeddings")
    if case.config.tie_word_embeddings and placement.stage_of[0] == placement.stage_of[-1] and plan.num_stages > 1:
        found.add("tied embeddings on one stage")
    if plan.num_parts > plan.num_stages > 1:
        per_stage = len(placement.parts[0])
        found |= {name for name, make in PLACEMENT_FEATURES.items() if placement == make(plan.num_stages, per_stage)}
    if case.weighted:
        found.add("weighted sequences")
    if 1 in plan.lengths and 2 in plan.lengths:
        found.add("sequences of 1 and 2 tokens")
    for replica in plan.replicas:
        if any(action.kind.row.leaves_behind for actions in replica.actions for action in actions):
            found.add("split backward")
        if len(replica.pipelines) > 1:
            found.add("several pipelines")
        if len(replica.chunks) < plan.num_stages:
            found.add("fewer chunks than stages")
        recomputed = [max(row[k] for row in replica.recompute) for k in range(len(replica.chunks))]
        sizes: dict[int, list[int]] = {}
        for chunk, layers in zip(replica.chunks, recomputed, strict=True):
            piece = chunk.partial
            if piece is None:
                continue
            if layers:
                sizes.setdefault(piece.sequence, []).append(piece.num_tokens)
            if layers and chunk.kind == ChunkKind.HYBRID:
                found.add("recomputed hybrid chunk")
            if not bool((batch.labels[piece.sequence][piece.start : piece.stop] >= 0).any()):
                found.add("slice without supervised tokens")
            window = getattr(case.config, "sliding_window", None)
            if window and piece.start > 0 and piece.stop > window:
                found.add("sliding window across slices")
        if any(len(set(group)) < len(group) for group in sizes.values()):
            found.add("equal slices recomputed")
    return frozenset(found)


PLACEMENT_FEATURES = {"interleaved": Placement.interleaved, "v-shape": Placement.v_shaped}
