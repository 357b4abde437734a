"""What parameters, gradients and optimizer states weigh on a device: promised by every command, and held by real runs.

Two tables:

* for known models and layouts, the bytes of the heaviest stage by ``plan``, by the preset, by ``profile`` and by ``train``, which
  must be equal (a profile is of the defaults of both policies; presets are of LLaMA models in bfloat16 only);
* for two small models, one of them with experts, float32 and bfloat16, every policy and several layouts: the most that every process
  holds in a step over two sequences of one token, when activations are next to nothing, against the peak that is promised.

The last line printed is a JSON object: ``disagreements`` of the first table, and the largest relative difference ``measured_err``
and number of ``measurements`` of the second.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from infinipipe.cli.plan import PlanOptions, read_cost
from infinipipe.cost import GatherPolicy, GradientPolicy, Holding, even_stages, flop_cost, preset, state_bytes
from infinipipe.data.settings import DataSettings
from infinipipe.model import build_stage
from infinipipe.plan import Chunk, Pipeline, Plan, build_replica, whole
from infinipipe.planner import replica_peaks
from infinipipe.profile import Setup, formula
from infinipipe.runtime import Batch, Executor, Layout
from infinipipe.runtime.footprint import footprint
from infinipipe.runtime.pool import WorkerPool, get_mesh
from infinipipe.train.planning import StepPlanner
from infinipipe.train.settings import ModelSettings, ParallelSettings, Settings
from infinipipe.verify.distributed import make_parameters

Dtype = Literal["float32", "bfloat16"]
KNOWN: Mapping[str, tuple[PretrainedConfig, Dtype]] = {
    "Llama 7B": (LlamaConfig(), "bfloat16"),
    "Llama 7B float32": (LlamaConfig(), "float32"),
    "Qwen2.5 7B": (
        Qwen2Config(
            num_hidden_layers=28,
            hidden_size=3584,
            intermediate_size=18944,
            num_attention_heads=28,
            num_key_value_heads=4,
            vocab_size=152064,
            tie_word_embeddings=False,
        ),
        "bfloat16",
    ),
    "Mixtral 8x7B": (MixtralConfig(), "bfloat16"),
    "Qwen3-30B-A3B": (
        Qwen3MoeConfig(num_hidden_layers=48, head_dim=128, num_experts=128, num_experts_per_tok=8),
        "bfloat16",
    ),
    "Gemma 3 4B": (
        Gemma3TextConfig(
            num_hidden_layers=34,
            hidden_size=2560,
            intermediate_size=10240,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            vocab_size=262208,
        ),
        "bfloat16",
    ),
}
PRESETS = {"Llama 7B": "7b-a100"}
LAYOUTS = ((1, 1, 1), (4, 8, 1), (4, 2, 2))
"""Stages, processes that share one, replicas."""
SIZES: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
SMALL: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, intermediate_size=512),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128),
}
RUNS = (Layout(), Layout(stages=2), Layout(sequence=2), Layout(replicas=2), Layout(stages=2, sequence=2))
POLICIES: tuple[tuple[GatherPolicy, GradientPolicy], ...] = (
    ("keep", "whole"),
    ("release", "whole"),
    ("keep", "sharded"),
    ("release", "sharded"),
)


def promises(config: PretrainedConfig, dtype: Dtype, layout: tuple[int, int, int], name: str) -> dict[str, int]:
    """Bytes of the heaviest stage by each command."""
    stages, sequence_parallel, replicas = layout
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        options = PlanOptions("", folder, stages, sequence_parallel=sequence_parallel, replicas=replicas, dtype=dtype)
        planned = read_cost(options, [4096])
    layers = planned.stage_layers
    found = {"plan": max(planned.state_bytes(stage) for stage in range(stages))}
    if name in PRESETS:
        holding = Holding(sequence_parallel=sequence_parallel, replicas=replicas)
        found["preset"] = max(
            preset(PRESETS[name], layers, sequence_parallel=sequence_parallel, holding=holding).states
        )
    found["profile"] = max(
        formula(Setup(config, layers, dtype=dtype, sequence_parallel=sequence_parallel), layers).states
    )
    settings = Settings(
        model=ModelSettings(config={"model_type": config.model_type}, dtype=dtype),
        data=DataSettings(files=["none"]),
        parallel=ParallelSettings(
            stages=stages, sequence_parallel=sequence_parallel, replicas=replicas, stage_layers=list(layers)
        ),
    )
    found["train"] = max(StepPlanner(settings, config, 4096).cost.states)
    return found


class LiveBytes(TorchDispatchMode):
    """The most bytes of all storages that operators have met and that still live, also of those that change their size.

    Attributes:
        peak: those bytes, after any operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = False
        for tensor in _tensors((args, kwargs or {}, result)):
            storage = tensor.untyped_storage()
            if (ref := self._seen.get(storage._cdata)) is None or ref() is None:
                self._seen[storage._cdata] = weakref.ref(storage)
                is_new = True
        if not is_new:
            return result  # Without a new storage there is no new peak.
        self._seen = {key: ref for key, ref in self._seen.items() if ref() is not None}
        self.peak = max(self.peak, sum(own.nbytes() for ref in self._seen.values() if (own := ref()) is not None))
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, DTensor):  # It wraps the tensor that has the bytes.
        yield tree._local_tensor
    elif isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def plan_of(layers: Sequence[int], layout: Layout) -> Plan:
    """Two chunks of one token for every replica."""
    lengths = (1,) * (2 * layout.replicas)
    chunks = [Chunk(whole(lengths, [sequence])) for sequence in range(len(lengths))]
    replicas = [build_replica((Pipeline(tuple(chunks[i : i + 2])),), layout.stages) for i in range(0, len(chunks), 2)]
    return Plan(tuple(layers), lengths, tuple(replicas))


def held(
    rank: int, config: PretrainedConfig, dtype: str, layout: Layout, policy: GatherPolicy, gradients: GradientPolicy
) -> int:
    """One worker's part: the most bytes that it holds in a step over sequences of one token, the optimizer's step excepted."""
    mesh = get_mesh(layout)
    if not mesh.is_member:
        return 0
    layers = even_stages(config.num_hidden_layers, layout.stages)
    with LiveBytes() as live:
        stage = build_stage(config, layers, mesh.parts)
        parameters = make_parameters(stage, mesh, getattr(torch, dtype), policy, gradients)
        executor = Executor(stage, mesh.transport(), parameters, loss_block_tokens=1, shard=mesh.shard)
        optimizer = torch.optim.AdamW(p for _, p in parameters.named())
        plan = plan_of(layers, layout)
        batch = Batch.from_tokens([torch.tensor([1])] * len(plan.lengths))
        for _ in range(2):
            parameters.zero_grad()
            live.peak = 0
            executor.step(plan.replicas[mesh.replica], batch)
            peak = live.peak
            optimizer.step()
            parameters.publish()
    return peak


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Bytes of one process, measured and promised."""

    model: str
    dtype: str
    layout: Layout
    policy: GatherPolicy
    gradients: GradientPolicy
    measured: int
    promised: int

    @property
    def error(self) -> float:
        return self.promised / self.measured - 1


def measure(pool: WorkerPool, name: str, dtype: str, layout: Layout, number: int) -> list[Measurement]:
    """A run; what the first process of every stage holds."""
    policy, gradients = POLICIES[number]
    config, processes = SMALL[name], layout.replicas * layout.stages * layout.sequence
    whole_layout = layout.for_heads(config.num_attention_heads)
    found = pool.run(held, config, dtype, whole_layout, policy, gradients)[:processes]
    holding = Holding(
        element_bytes=getattr(torch, dtype).itemsize,
        sequence_parallel=layout.sequence,
        replicas=layout.replicas,
        gather_policy=policy,
        gradient_policy=gradients,
    )
    known = footprint(config, getattr(torch, dtype))
    layers = even_stages(known.shape.layers, layout.stages)
    cost = flop_cost(
        known.shape,
        layers,
        element_bytes=holding.element_bytes,
        sequence_parallel=layout.sequence,
        states=state_bytes(known.shape, layers, None, holding),
        block_tokens=1,
        layers=known.layers,
    )
    promised = replica_peaks(plan_of(layers, layout).replicas[0], cost)
    return [
        Measurement(name, dtype, layout, policy, gradients, found[stage * layout.sequence], promised[stage])
        for stage in range(layout.stages)
    ]


def print_promises(*, quick: bool) -> int:
    """The first table, or one model of it; returns how many rows disagree."""
    disagreements, models = 0, list(KNOWN.items())[3:4] if quick else list(KNOWN.items())
    print(f"{'model':18}{'stages x sharing x replicas':>28}  GB of the heaviest stage")
    for (name, (config, dtype)), layout in itertools.product(models, LAYOUTS):
        found = promises(config, dtype, layout, name)
        disagreements += len(set(found.values())) > 1
        figures = "  ".join(f"{command} {size / 1e9:.3f}" for command, size in found.items())
        print(f"{name:18}{' x '.join(map(str, layout)):>28}  {figures}", flush=True)
    return disagreements


def print_measurements(rows: Sequence[Measurement]) -> None:
    for row in rows:
        layout = f"{row.layout.replicas}x{row.layout.stages}x{row.layout.sequence}"
        policies = f"{row.policy}, {row.gradients}"
        print(
            f"{row.model:10}{row.dtype:10}{layout:7}{policies:18}{row.measured / 1e6:9.3f} MB, promised "
            f"{row.promised / 1e6:9.3f} MB, {row.error:+.1%}",
            flush=True,
        )


def run(*, quick: bool) -> dict[str, object]:
    """Both tables."""
    started = time.monotonic()
    disagreements = print_promises(quick=quick)
    torch.set_num_threads(1)
    rows: list[Measurement] = []
    print("\nmodel     dtype     layout (replicas x stages x sharing), policies")
    with WorkerPool(4) as pool:
        layouts = list(enumerate(RUNS))[1:3] if quick else list(enumerate(RUNS))
        for (index, layout), name, dtype in itertools.product(layouts, SMALL, ("float32", "bfloat16")):
            alone = layout.sequence * layout.replicas == 1
            numbers = (0,) if alone else range(4) if not quick else ((index + (dtype == "bfloat16")) % 4,)
            for number in numbers:
                if POLICIES[number][1] == "sharded" and layout.sequence == 1:
                    continue
                own = measure(pool, name, dtype, layout, number)
                print_measurements(own)
                rows += own
    return {
        "disagreements": disagreements,
        "measured_err": max(abs(row.error) for row in rows),
        "measurements": len(rows),
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Model states: promised by every command, and held.")
    parser.add_argument("--quick", action="store_true", help="fewer policies; under 50 s on two cores")
    print(json.dumps(run(quick=parser.parse_args().quick)))


if __name__ == "__main__":
    main()
