"""Contract 3: loss and gradients of any plan equal those of the plain model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinipipe.cost import GatherPolicy, even_stages
from infinipipe.plan import Chunk, Pipeline, Placement, Plan, build_replica, cut, whole
from infinipipe.runtime import Layout
from infinipipe.runtime.pool import WorkerError, WorkerPool
from infinipipe.verify import FAMILIES, Case, random_plan, run_in_pool, run_locally
from infinipipe.verify.plans import random_layers, random_placement

LENGTHS = [1, 2, 3, 17, 41, 89, 137]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4) as workers:
        yield workers


def draw(rng: random.Random, family: str, num_stages: int, *, num_replicas: int = 1, seed: int = 0) -> Case:
    lengths = [rng.choice(LENGTHS) for _ in range(rng.randint(1, 5))]
    layers = even_stages(4, num_stages)
    plan = random_plan(rng, lengths, layers, recompute=rng.choice(["none", "all", "random"]), num_replicas=num_replicas)
    return Case(FAMILIES[family](), plan, seed=seed, masked=rng.choice([0.0, 0.5]), weighted=rng.choice([False, True]))


@given(st.integers(0, 100_000), st.sampled_from(sorted(FAMILIES)), st.integers(1, 3), st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_any_placement_is_exact_in_one_process(seed: int, family: str, num_stages: int, num_replicas: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    placement = random_placement(rng, num_stages)
    lengths = [rng.choice(LENGTHS) for _ in range(rng.randint(1, 5))]
    layers = random_layers(rng, 4, placement.num_parts)
    plan = random_plan(rng, lengths, layers, num_replicas=num_replicas, placement=placement)
    outcome = run_locally(Case(FAMILIES[family](), plan, seed=seed, masked=rng.choice([0.0, 0.5])))
    assert outcome.gradient_error < 1e-9
    assert outcome.loss_difference < 1e-9


@given(st.integers(0, 100_000), st.sampled_from(sorted(FAMILIES)), st.integers(1, 4), st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_any_plan_is_exact_in_one_process(seed: int, family: str, num_stages: int, num_replicas: int) -> None:
    torch.set_num_threads(1)
    outcome = run_locally(draw(random.Random(seed), family, num_stages, num_replicas=num_replicas, seed=seed))
    assert outcome.gradient_error < 1e-9
    assert outcome.loss_difference < 1e-9


def test_random_plans_are_exact_on_processes(pool: WorkerPool) -> None:
    torch.set_num_threads(1)
    features: Counter[str] = Counter()
    rng = random.Random(7)
    for number in range(20):
        case = draw(rng, sorted(FAMILIES)[number % 5], 1 + number % 4, seed=number)
        outcome = run_in_pool(pool, case)
        assert outcome.gradient_error < 1e-9, case
        assert outcome.loss_difference < 1e-9, case
        features.update(outcome.features)
    assert {"tied embeddings", "several pipelines", "sliding window across slices"} <= features.keys()


@pytest.mark.parametrize("policy", ["keep", "release"])
def test_placements_are_exact_on_shards_and_replicas(pool: WorkerPool, policy: GatherPolicy) -> None:
    """Tied weights on one stage and on two, sharded and replicated, backwards in halves; one replica without a chunk."""
    rng = random.Random(11)
    features: Counter[str] = Counter()
    for number, make in enumerate([Placement.v_shaped, Placement.interleaved, Placement.v_shaped]):
        layout = (Layout(stages=2, sequence=2), Layout(replicas=2, stages=2), Layout(stages=2, sequence=2))[number]
        lengths = [89, 41, 3] if number else [137]
        plan = random_plan(
            rng, lengths, (1, 0, 2, 1), num_replicas=layout.replicas, placement=make(2), schedules=["zero-bubble"]
        )
        outcome = run_in_pool(pool, Case(FAMILIES["qwen2"](), plan, seed=number), layout, policy=policy)
        assert outcome.gradient_error < 1e-9
        features.update(outcome.features)
    assert {"split backward", "v-shape", "interleaved", "tied embeddings on one stage", "tied embeddings"} <= set(
        features
    )


def test_float32_is_close(pool: WorkerPool) -> None:
    rng = random.Random(3)
    for number, family in enumerate(sorted(FAMILIES)):
        plan = random_plan(rng, [137, 41, 5], even_stages(4, 2))
        outcome = run_in_pool(pool, Case(FAMILIES[family](), plan, dtype="float32", seed=number))
        assert outcome.gradient_error < 1e-4


def test_bfloat16_learns_in_float32() -> None:
    """Compute in bfloat16, accumulation in float32: near the float64 gradients, as near as one chunk alone."""
    case = Case(FAMILIES["llama"](), random_plan(random.Random(5), [137, 89, 41], (2, 2)), dtype="bfloat16")
    assert run_locally(case).gradient_error < 0.3


def test_uneven_stages_and_a_stage_without_layers(pool: WorkerPool) -> None:
    for layers in ((1, 3), (0, 4), (3, 0, 1), (4, 0)):
        case = Case(FAMILIES["gemma3"](), random_plan(random.Random(1), [41, 89, 3], layers))
        assert run_in_pool(pool, case).gradient_error < 1e-9


def test_fewer_chunks_than_stages(pool: WorkerPool) -> None:
    lengths = (33,)
    for chunks in ([Chunk(whole(lengths, [0]))], [Chunk((piece,)) for piece in cut(0, 33, [11])]):
        replica = build_replica([Pipeline(tuple(chunks))], 4, recompute=[[1] * len(chunks)] * 4)
        case = Case(FAMILIES["qwen2"](), Plan((1, 1, 1, 1), lengths, (replica,)))
        assert run_in_pool(pool, case).gradient_error < 1e-9


def test_a_batch_without_any_label_contributes_zero() -> None:
    replica = build_replica([Pipeline((Chunk(whole((1, 1), [0, 1])),))], 2)
    outcome = run_locally(Case(FAMILIES["llama"](), Plan((2, 2), (1, 1), (replica,))))
    assert outcome.gradient_error == 0.0
    assert outcome.loss_difference == 0.0


def _fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("planted")


def test_a_failing_worker_is_reported() -> None:
    with WorkerPool(2) as workers, pytest.raises(WorkerError, match="planted"):
        workers.run(_fail)
