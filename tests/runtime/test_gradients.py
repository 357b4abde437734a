"""Between backward and optimizer: tied weights, the global norm, clipping; on real processes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from infinipipe.cost import even_stages
from infinipipe.plan import Plan
from infinipipe.runtime import Executor, Layout, Parameters, clip_gradients, gradient_norm, sync_shared_gradients
from infinipipe.runtime.pool import WorkerPool, get_mesh
from infinipipe.verify import FAMILIES, Case, random_plan
from infinipipe.verify.cases import make_batch, make_stage, precision
from infinipipe.verify.reference import plain_model, reference_step


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(3) as workers:
        yield workers


def _train(rank: int, case: Case, steps: int, max_norm: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh = get_mesh(Layout(stages=case.plan.num_stages))
    if not mesh.is_member:
        return [], {}
    stage = make_stage(case, rank)
    parameters = Parameters(stage)
    executor = Executor(stage, mesh.transport(), parameters)
    optimizer = torch.optim.SGD([p for _, p in parameters.named()], lr=0.1, momentum=0.9)
    norms = []
    for _ in range(steps):
        parameters.zero_grad()
        with precision(case):
            executor.step(case.plan.replicas[0], make_batch(case))
        sync_shared_gradients(stage, parameters, mesh)
        norms.append(clip_gradients(stage, parameters, mesh, max_norm))
        assert gradient_norm(stage, parameters, mesh) <= max_norm * (1 + 1e-9)
        optimizer.step()
        parameters.publish()
    return norms, {name: p.detach() for name, p in parameters.named()}


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_training_equals_the_plain_models(pool: WorkerPool, family: str, num_stages: int) -> None:
    """Norms and weights over some clipped steps: each parameter counted once, tied copies kept equal."""
    plan = random_plan(random.Random(4), [41, 17, 89], even_stages(4, num_stages))
    case = Case(FAMILIES[family](), plan, seed=2)
    results = pool.run(_train, case, 4, 0.5)
    one = Plan((4,), plan.lengths, ())
    model = plain_model(case.config, make_stage(Case(case.config, one, seed=2), 0).model.state_dict(), torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for _ in range(4):
        with precision(case):
            _, gradients = reference_step(model, make_batch(case))
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    expected = dict(model.named_parameters())
    for rank in range(num_stages):
        assert results[rank][0] == pytest.approx(norms, rel=1e-9)
        for name, weight in results[rank][1].items():
            name = "model.embed_tokens.weight" if name not in expected else name
            torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-9, atol=1e-12)
    if family == "qwen2" and num_stages > 1:
        first, last = results[0][1], results[num_stages - 1][1]
        assert torch.equal(first["model.embed_tokens.weight"], last["lm_head.weight"])
