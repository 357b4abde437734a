"""Peak live activation bytes per stage, cut finely or not, as measured and as the cost model's formula says.

Every stage is a process of its own that runs a step under :class:`infinipipe.runtime.MemoryMeter`. Three tables:

* one sequence on 2 stages of 2 layers, every layer recomputed, cut into 1, 4 and 16 slices, against its length;
* the same without recompute, but for the longest;
* 8 equal sequences without recompute on 4 stages, cut into 1 and 16 slices each.

The last line printed is a JSON object: ``peak_ratio_one_sequence`` and ``peak_ratio_pipeline`` are peaks with 16 slices over
peaks with one (the first table's worst stage at its longest sequence; the third's first stage); ``formula_err`` is the largest
relative difference between formula and measurement in those two comparisons, ``formula_err_all`` in all tables.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
from transformers import LlamaConfig

from infinipipe.cost import flop_cost
from infinipipe.model import build_stage
from infinipipe.plan import Chunk, Pipeline, Placement, Plan, build_replica, cut
from infinipipe.planner.memory import check
from infinipipe.runtime import Batch, Executor, MemoryMeter, Parameters, ProcessGroupTransport, channel_groups
from infinipipe.runtime.footprint import footprint
from infinipipe.runtime.pool import WorkerPool
from infinipipe.runtime.transport import ChannelGroups

NUM_WORKERS = 4
LOSS_BLOCK_TOKENS = 64
CUTS = (1, 4, 16)


@dataclass(frozen=True)
class Model:
    """The sizes of the Llama model that is measured."""

    layers: int
    hidden: int = 256
    intermediate: int = 704
    heads: int = 8
    kv_heads: int = 2
    vocab: int = 512

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
        )


@dataclass(frozen=True)
class Row:
    """One measurement; bytes per stage."""

    stages: int
    recomputed: bool
    sequences: int
    length: int
    slices: int
    measured: list[int]
    formula: list[int]

    def error(self, stage: int) -> float:
        """Relative difference of the formula at a stage."""
        return abs(self.formula[stage] / self.measured[stage] - 1)


def make_plan(stage_layers: Sequence[int], sequences: int, length: int, slices: int, *, recomputed: bool) -> Plan:
    """1F1B over equal sequences, each cut into equal slices; every layer recomputed, or none."""
    borders = [length * i // slices for i in range(1, slices)]
    chunks = tuple(Chunk((piece,)) for sequence in range(sequences) for piece in cut(sequence, length, borders))
    recompute = [[layers if recomputed else 0] * len(chunks) for layers in stage_layers]
    replica = build_replica([Pipeline(chunks)], len(stage_layers), recompute=recompute)
    plan = Plan(tuple(stage_layers), (length,) * sequences, (replica,))
    plan.validate()
    return plan


@lru_cache(maxsize=1)
def groups() -> ChannelGroups:
    """A worker's communicators; all workers make them at once."""
    return channel_groups([range(NUM_WORKERS)], Placement.plain(NUM_WORKERS))


def connect(rank: int) -> None:
    """A worker's part in making the communicators."""
    groups()


def measure_stage(rank: int, model: Model, plan: Plan) -> int:
    """A worker's part: run a step as stage ``rank`` and return its peak of live bytes."""
    stage = build_stage(model.config(), plan.stage_layers, rank)
    transport = ProcessGroupTransport(range(plan.num_stages), groups(), plan.placement)
    executor = Executor(stage, transport, Parameters(stage), loss_block_tokens=LOSS_BLOCK_TOKENS)
    generator = torch.Generator().manual_seed(0)
    batch = Batch.from_tokens([torch.randint(0, model.vocab, (n,), generator=generator) for n in plan.lengths])
    with MemoryMeter() as meter:
        executor.step(plan.replicas[0], batch)
    if meter.current:
        raise RuntimeError(f"{meter.current} bytes are still live after the step")
    return meter.peak


def measure(
    pool: WorkerPool, stage_layers: Sequence[int], sequences: int, length: int, slices: int, *, recomputed: bool
) -> Row:
    """Run a plan on the pool and evaluate the formula on its action lists."""
    model = Model(layers=sum(stage_layers))
    plan = make_plan(stage_layers, sequences, length, slices, recomputed=recomputed)
    known = footprint(model.config(), torch.float32)
    cost = flop_cost(
        known.shape,
        plan.stage_layers,
        element_bytes=4,
        states=[0] * plan.num_stages,
        block_tokens=LOSS_BLOCK_TOKENS,
        layers=known.layers,
    )
    (formula,) = check(plan, cost, 2**62)
    measured = pool.run(measure_stage, model, plan, ranks=range(plan.num_stages))
    row = Row(plan.num_stages, recomputed, sequences, length, slices, measured, formula)
    print_row(row)
    return row


def print_row(row: Row) -> None:
    """One line of a table, in MiB for every stage: measured / formula."""
    cells = (f"{m / 2**20:8.2f} /{f / 2**20:8.2f}" for m, f in zip(row.measured, row.formula, strict=True))
    print(f"{row.length:9d} {row.slices:7d}  " + "  ".join(f"{cell:>18s}" for cell in cells), flush=True)


def print_title(title: str, stages: int) -> None:
    print(
        f"\n{title}; MiB measured / formula\n   length  slices  "
        + "  ".join(f"{f'stage {i}':>18s}" for i in range(stages))
    )


def run(*, quick: bool) -> dict[str, object]:
    """Measure all tables."""
    lengths = (1024, 4096) if quick else (1024, 4096, 16384)
    pipeline_length = 1024 if quick else 4096
    started = time.monotonic()
    with WorkerPool(NUM_WORKERS) as pool:
        pool.run(connect)
        tables: dict[bool, list[Row]] = {}
        for recomputed in (True, False):
            print_title(f"one sequence, 2 stages of 2 layers, {'all' if recomputed else 'none'} recomputed", 2)
            tables[recomputed] = [
                measure(pool, (2, 2), 1, length, slices, recomputed=recomputed)
                for length in (lengths if recomputed else lengths[:-1])
                for slices in CUTS
            ]
        print_title("8 equal sequences, 4 stages of 2 layers, none recomputed", 4)
        many = [measure(pool, (2,) * 4, 8, pipeline_length, slices, recomputed=False) for slices in (CUTS[0], CUTS[-1])]
    one = tables[True][-len(CUTS) :: len(CUTS) - 1]
    everything = tables[True] + tables[False] + many
    return {
        "peak_ratio_one_sequence": max(one[-1].measured) / max(one[0].measured),
        "peak_ratio_pipeline": many[-1].measured[0] / many[0].measured[0],
        "formula_err": max([row.error(stage) for row in one for stage in range(2)] + [row.error(0) for row in many]),
        "formula_err_all": max(row.error(stage) for row in everything for stage in range(row.stages)),
        "seconds": time.monotonic() - started,
        "rows": [asdict(row) for row in everything],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak activation memory of sliced and unsliced steps.")
    parser.add_argument("--quick", action="store_true", help="shorter sequences; under 50 s on two cores")
    print(json.dumps(run(quick=parser.parse_args().quick)))


if __name__ == "__main__":
    main()
