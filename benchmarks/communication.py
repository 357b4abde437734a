"""Bytes that every process sends in a step, and bytes of model states that it holds, against what they should be.

Counts the collectives and messages of real steps on four processes, in layouts of replicas, stages and sequence parallelism, as they
pass through torch's dispatcher, and compares each kind with its formula: activations and their gradients between stages, Ulysses'
all-to-alls (four a layer and pass), parameters gathered once a step (policy ``keep``), gradients reduced once a step. States are all
tensors that live in the process after an optimizer step. The last line printed is a JSON object with the ratios of measured to expected.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from infinipipe.model import Stage, build_stage
from infinipipe.plan import Plan, ReplicaPlan, Send
from infinipipe.runtime import Batch, Executor, Layout, Mesh, sync_shared_gradients
from infinipipe.runtime.gradients import gradient_norm
from infinipipe.runtime.pool import WorkerPool, get_mesh
from infinipipe.verify.distributed import make_parameters
from infinipipe.verify.families import FAMILIES
from infinipipe.verify.plans import random_plan

LAYOUTS = [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2)]
"""Replicas, stages, sequence-parallel processes."""
KINDS = {
    "send": "messages",
    "alltoall_base_": "all_to_all",
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "reduce",
    "allreduce_": "reduce",
}
FLOAT32 = 4
ADAMW = 16


class Sent(TorchDispatchMode):
    """Counts the bytes that leave this process, by kind; those of an all-reduce as a ring sends them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function.namespace == "c10d":
            name = function.name().split("::")[1].split(".")[0]
            if name in KINDS:
                self.bytes[KINDS[name]] += _leaving(name, args)
            elif name not in ("recv_",):
                raise RuntimeError(f"a collective that is not accounted for: {function.name()}")
        return function(*args, **(kwargs or {}))


def _leaving(name: str, args: tuple[Any, ...]) -> int:
    tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, torch.Tensor)]
    if name == "send":
        return tensors[0].nbytes
    size = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject))).size()
    whole = max(tensor.nbytes for tensor in tensors)
    return round(whole * (size - 1) / size * (2 if name == "allreduce_" else 1))


def expected_bytes(stage: Stage, replica: ReplicaPlan, layout: Layout, parameters: int, tied: int) -> dict[str, float]:
    """Bytes that one process of ``stage`` sends in a step; ``parameters`` and ``tied`` count elements."""
    config, sequence = stage.model.config, layout.sequence
    rows = {number: -(-chunk.num_tokens // sequence) for number, chunk in enumerate(replica.chunks)}
    place = replica.placement.parts.index(stage.parts)
    sends = [op for op in replica.program.operations(place) if isinstance(op, Send)]
    messages = sum(rows[send.chunk] for send in sends) * stage.hidden_size * FLOAT32
    ulysses = layout.ulysses or layout.sequence
    kv_heads = math.lcm(config.num_key_value_heads, ulysses)
    width = 2 * (config.num_attention_heads + kv_heads) * config.head_dim
    (part,) = stage.parts
    passes = 0
    for action in replica.actions[place]:
        row, layers = action.kind.row, replica.recompute[part][action.chunk]
        times = (row.flow is not None) * stage.stage_layers[part] + row.recomputes * layers
        passes += rows[action.chunk] * times
    other = (sequence - 1) / sequence
    reduced = parameters * other + 2 * parameters / sequence * (layout.replicas - 1) / layout.replicas
    return {
        "messages": messages,
        "all_to_all": passes * width * FLOAT32 * other,
        "gather": parameters * FLOAT32 * other,
        "reduce": FLOAT32 * (reduced + tied / sequence),
    }


def live_bytes() -> int:
    """Bytes of all tensors that live in this process."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure(rank: int, plan: Plan, layout: Layout, changes: dict[str, Any]) -> dict[str, Any]:
    """One worker's part: a step with everything counted; measured and expected bytes by kind, and states."""
    mesh: Mesh = get_mesh(layout)
    gc.collect()
    before = live_bytes()
    stage = build_stage(FAMILIES["qwen3"](**changes), plan.stage_layers, mesh.parts, seed=0)
    own = sum(p.numel() for p in stage.model.parameters())
    tied = 0 if stage.shared is None else stage.model.get_parameter(stage.shared.name).numel()
    parameters = make_parameters(stage, mesh, torch.float32, "keep", "whole")
    executor = Executor(stage, mesh.transport(), parameters, shard=mesh.shard)
    optimizer = torch.optim.AdamW(p for _, p in parameters.named())
    generator = torch.Generator().manual_seed(0)
    batch = Batch.from_tokens([torch.randint(0, 500, (n,), generator=generator) for n in plan.lengths])
    replica = plan.replicas[mesh.replica]
    parameters.zero_grad()
    with Sent() as sent:
        executor.step(replica, batch)
        sync_shared_gradients(stage, parameters, mesh)
        gradient_norm(stage, parameters, mesh)
    optimizer.step()
    parameters.publish()
    gc.collect()
    states = live_bytes() - before
    return {
        "sent": dict(sent.bytes),
        "expected": expected_bytes(stage, replica, layout, own, tied),
        "states": states,
        "share": ADAMW * own / layout.sequence,
    }


def make_plan(layout: Layout, num_layers: int, lengths: list[int]) -> Plan:
    """A random plan in which every replica has something to do."""
    layers = [num_layers // layout.stages] * layout.stages
    for seed in range(100):
        plan = random_plan(random.Random(seed), lengths, layers, num_replicas=layout.replicas)
        if all(replica.chunks for replica in plan.replicas):
            return plan
    raise AssertionError("no plan in which every replica has a chunk")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller model, under 50 seconds")
    options = parser.parse_args()
    width = 128 if options.quick else 256
    changes = {"hidden_size": width, "intermediate_size": 2 * width, "vocab_size": 509, "head_dim": width // 4}
    lengths = [137, 89, 1, 241] if options.quick else [137, 89, 1, 2041, 603]
    ratios: dict[str, float] = {}
    worst_states, worst_share = 0.0, 0.0
    with WorkerPool(4) as pool:
        for sizes in LAYOUTS:
            layout = Layout(*sizes).for_heads(4)
            results = pool.run(measure, make_plan(layout, 4, lengths), layout, changes)
            for kind in ("messages", "all_to_all", "gather", "reduce"):
                pairs = [(r["sent"].get(kind, 0), r["expected"][kind]) for r in results]
                for sent, expected in pairs:
                    ratio = sent / expected if expected else 1.0 + sent / 1e6
                    if abs(ratio - 1) >= abs(ratios.get(kind, 1.0) - 1):
                        ratios[kind] = ratio
                shown = ", ".join(f"{sent / 1e3:.1f}/{expected / 1e3:.1f}" for sent, expected in pairs)
                print(f"{sizes} {kind}: kB sent/expected by rank {shown}")
            states = max(r["states"] / r["share"] for r in results)
            worst_states = max(worst_states, states)
            worst_share = max(worst_share, max(r["share"] for r in results))
            print(f"{sizes} states: {states:.4f} of the exact share, {results[0]['share'] / 1e6:.2f} MB on rank 0")
    figures = {
        "layouts": len(LAYOUTS),
        "sent_over_formula": {kind: round(ratio, 4) for kind, ratio in ratios.items()},
        "states_over_share_max": round(worst_states, 4),
        "largest_share_bytes": round(worst_share),
    }
    print(json.dumps(figures))
    good = all(abs(ratio - 1) <= 0.05 for ratio in ratios.values()) and worst_states <= 1.05
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
