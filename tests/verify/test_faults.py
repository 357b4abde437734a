"""Faults planted on purpose are caught: the exactness check can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infinipipe.cost import even_stages
from infinipipe.model import IGNORE, ChunkContext, KVStore, Product, Stage, WeightGradients, settle
from infinipipe.model import loss as loss_module
from infinipipe.plan import Chunk, Pipeline, Placement, Plan, build_replica, cut, whole
from infinipipe.runtime import Batch, Executor
from infinipipe.runtime import executor as executor_module
from infinipipe.verify import FAMILIES, Case, run_locally
from infinipipe.verify.cases import make_batch

LENGTHS = (96, 20, 9)


def make_case(schedule: str = "1f1b", placement: Placement | None = None) -> Case:
    """Three equal slices, every layer recomputed, the last one beside whole sequences."""
    first, second, third = cut(0, 96, [32, 64])
    chunks = (Chunk((first,)), Chunk((second,)), Chunk((third, *whole(LENGTHS, [1, 2]))))
    placement = placement or Placement.plain(2)
    layers = even_stages(4, placement.num_parts)
    replica = build_replica([Pipeline(chunks)], placement, schedule=schedule, recompute=[[n] * 3 for n in layers])
    return Case(FAMILIES["llama"](), Plan(layers, LENGTHS, (replica,)), seed=3)


class AppendingStore(KVStore):
    """Keeps keys and values as a growing list, to which a recompute appends again."""

    def __init__(self) -> None:
        super().__init__()
        self._lists: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}

    def write(self, sequence: int, layer: int, length: int, start: int, key: Tensor, value: Tensor) -> None:
        super().write(sequence, layer, length, start, key, value)
        self._lists.setdefault((sequence, layer), []).append((key, value))

    def read(self, sequence: int, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        pairs = self._lists[sequence, layer]
        keys, values = (torch.cat(column)[start - stop :] for column in zip(*pairs, strict=True))
        return keys, values


class ForgetfulStore(KVStore):
    """Drops what later slices leave for earlier ones."""

    def accumulate_gradients(
        self, sequence: int, layer: int, start: int, first_key: int, key_grad: Tensor, value_grad: Tensor
    ) -> None:
        super().accumulate_gradients(sequence, layer, start, first_key, key_grad, value_grad)
        entry = self._entries.get((sequence, layer))
        if entry is not None and entry.key_grad is not None and entry.value_grad is not None:
            entry.key_grad.zero_()
            entry.value_grad.zero_()


def append_on_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "KVStore", AppendingStore)


def drop_gradients_of_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "KVStore", ForgetfulStore)


def shift_labels_within_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Batch.chunk_labels

    def shifted(batch: Batch, chunk: Chunk) -> Tensor:
        labels = plain(batch, chunk)
        if chunk.slices[0].stop < chunk.slices[0].length:
            labels[chunk.slices[0].num_tokens - 1] = IGNORE
        return labels

    monkeypatch.setattr(Batch, "chunk_labels", shifted)


def take_the_mean_of_chunk_means(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = loss_module.block_loss

    def normalised(hidden: Tensor, head: Any, labels: Tensor, *, scale: float, **kwargs: Any) -> Tensor:
        count = int((labels != IGNORE).sum())
        return plain(hidden, head, labels, scale=1.0 / (3 * max(1, count)), **kwargs)

    monkeypatch.setattr(loss_module, "block_loss", normalised)


def restart_positions_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    def positions(context: ChunkContext, device: torch.device) -> Tensor:
        ranges = [torch.arange(piece.num_tokens, device=device) for piece in context.chunk.slices]
        return torch.cat(ranges).unsqueeze(0)

    monkeypatch.setattr(ChunkContext, "positions", positions)


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [
        ("1f1b", Placement.plain(2)),
        ("zero-bubble", Placement.plain(2)),
        ("interleaved", Placement.interleaved(2)),
        ("zero-bubble", Placement.v_shaped(2)),
    ],
)
def test_without_a_fault_the_case_is_exact(schedule: str, placement: Placement) -> None:
    outcome = run_locally(make_case(schedule, placement))
    assert outcome.gradient_error < 1e-9
    assert outcome.loss_difference < 1e-9
    assert {"equal slices recomputed", "recomputed hybrid chunk"} <= outcome.features


def forget_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "settle", lambda products: products.clear())


def compute_weight_gradients_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(products: list[Product]) -> None:
        settle([*products, *products])

    monkeypatch.setattr(executor_module, "settle", twice)


def share_one_list_of_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that find the operands of a weight's first chunk, whichever chunk they belong to."""
    first: dict[int, Tensor] = {}

    def add(gradients: WeightGradients, weight: nn.Parameter, inputs: Tensor, grad: Tensor) -> None:
        operand = first.setdefault(id(weight), inputs)
        gradients.do(lambda: gradients._compute(weight, operand[torch.arange(len(grad)) % len(operand)], grad))

    monkeypatch.setattr(WeightGradients, "add", add)


@pytest.mark.parametrize("placement", [Placement.plain(2), Placement.v_shaped(2)])
@pytest.mark.parametrize(
    "plant", [forget_weight_gradients, compute_weight_gradients_twice, share_one_list_of_weight_gradients]
)
def test_a_planted_fault_of_second_halves_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert run_locally(make_case("zero-bubble", placement)).gradient_error > 1e-3


def test_a_norm_between_parts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage with the last part that normalises after its other parts too."""
    plain = Stage._modules_of

    def with_norm(stage: Stage, part: int) -> dict[str, nn.Module]:
        return plain(stage, part) | {"norm": stage.model.base_model.norm}

    monkeypatch.setattr(Stage, "_modules_of", with_norm)
    assert run_locally(make_case("interleaved", Placement.v_shaped(2))).gradient_error > 1e-3


def test_what_a_plan_leaves_behind_is_named() -> None:
    case = make_case("zero-bubble")
    replica = case.plan.replicas[0]
    cut_short = tuple(tuple(a for a in row if str(a) != "W1") for row in replica.actions)
    plan = replace(case.plan, replicas=(replace(replica, actions=cut_short),))
    with pytest.raises(RuntimeError, match="the operands of weight gradients of chunk 1 at part . are left at the end"):
        run_locally(replace(case, plan=plan))


def test_a_stage_refuses_plans_of_another_placement() -> None:
    case = make_case("zero-bubble", Placement.v_shaped(2))
    other = make_case("zero-bubble", Placement.interleaved(2)).plan.replicas[0]

    def check(executor: Executor) -> None:
        with pytest.raises(ValueError, match=r"places the parts \[\[0, 2\], \[1, 3\]\] .* but this stage has \[., .\]"):
            executor.step(other, make_batch(case))

    run_locally(case, check)


@pytest.mark.parametrize(
    "plant",
    [
        append_on_recompute,
        drop_gradients_of_context,
        shift_labels_within_slices,
        take_the_mean_of_chunk_means,
        restart_positions_in_slices,
    ],
)
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert run_locally(make_case()).gradient_error > 1e-3


def test_recompute_does_not_change_the_forward_of_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appending on recompute leaves the loss right: only gradients can reveal it."""
    append_on_recompute(monkeypatch)
    assert run_locally(make_case()).loss_difference < 1e-9


def test_prepare_sees_every_executor() -> None:
    seen: list[Executor] = []
    run_locally(make_case(), seen.append)
    assert [executor.stage.parts for executor in seen] == [(0,), (1,)]
