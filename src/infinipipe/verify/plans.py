"""Random plans: any order, any cuts, any packing that the vocabulary allows."""

from __future__ import annotations

import random
from collections.abc import Sequence

from infinipipe.plan import (
    Chunk,
    Pipeline,
    Placement,
    Plan,
    ReplicaPlan,
    Slice,
    build_replica,
    cut,
    default_warmup,
    whole,
)

OF_PARTS = ("interleaved", "zero-bubble")
"""Schedules for any placement."""
SCHEDULES = ("1f1b", "1f1b", "gpipe", *OF_PARTS)


def random_placement(rng: random.Random, num_stages: int) -> Placement:
    """Any placement over so many stages: plain, interleaved, v-shaped or without any pattern."""
    per_stage = rng.randint(2, 3)
    parts = list(range(num_stages * per_stage))
    rng.shuffle(parts)
    scattered = Placement(tuple(tuple(sorted(parts[s::num_stages])) for s in range(num_stages)))
    choices = (
        Placement.plain(num_stages),
        Placement.interleaved(num_stages, per_stage),
        Placement.v_shaped(num_stages, per_stage),
        scattered,
    )
    return rng.choice(choices)


def random_layers(rng: random.Random, num_layers: int, num_parts: int) -> tuple[int, ...]:
    """Layers of every part, some perhaps without any."""
    borders = sorted(rng.randint(0, num_layers) for _ in range(num_parts - 1))
    return tuple(b - a for a, b in zip([0, *borders], [*borders, num_layers], strict=True))


def random_borders(rng: random.Random, length: int, num_slices: int) -> list[int]:
    """Inner borders of ``num_slices`` slices, equal ones in half of the cases."""
    num_slices = min(num_slices, length)
    if rng.random() < 0.5:
        return [length * i // num_slices for i in range(1, num_slices)]
    return sorted(rng.sample(range(1, length), num_slices - 1))


def random_chunks(
    rng: random.Random, lengths: Sequence[int], sequences: Sequence[int], *, max_slices: int
) -> list[Chunk]:
    """Chunks of the given sequences: some cut, the others packed in handfuls, beside slices or by themselves.

    Chunks of different sequences interleave.
    """
    shorts: list[int] = []
    lanes: list[list[list[Slice]]] = []
    for sequence in sequences:
        if lengths[sequence] > 1 and rng.random() < 0.6:
            borders = random_borders(rng, lengths[sequence], rng.randint(2, max_slices))
            lanes.append([[piece] for piece in cut(sequence, lengths[sequence], borders)])
        else:
            shorts.append(sequence)
    while shorts:
        taken = [shorts.pop() for _ in range(min(len(shorts), rng.randint(1, 4)))]
        hosts = [slot for lane in lanes for slot in lane if not slot[0].is_whole]
        if hosts and rng.random() < 0.6:
            rng.choice(hosts).extend(whole(lengths, taken))
        else:
            lanes.append([list(whole(lengths, taken))])
    chunks = []
    while lanes:
        lane = rng.choice(lanes) if rng.random() < 0.3 else lanes[0]
        chunks.append(Chunk(tuple(lane.pop(0))))
        if not lane:
            lanes.remove(lane)
    return chunks


def random_replica(
    rng: random.Random,
    lengths: Sequence[int],
    sequences: Sequence[int],
    stage_layers: Sequence[int],
    *,
    max_slices: int = 5,
    recompute: str = "random",
    placement: Placement | None = None,
    schedules: Sequence[str] = SCHEDULES,
) -> ReplicaPlan:
    """A valid plan of one replica; ``recompute`` is ``none``, ``all`` or ``random`` per part and chunk.

    The schedule is one of ``schedules``, of which those that schedule one part on each stage are left out for a ``placement`` of
    several.
    """
    order = list(sequences)
    rng.shuffle(order)
    num_pipelines = rng.randint(1, min(3, max(1, len(order))))
    groups = [order[i::num_pipelines] for i in range(num_pipelines)] if order else []
    pipelines = [Pipeline(tuple(random_chunks(rng, lengths, group, max_slices=max_slices))) for group in groups]
    placement = placement or Placement.plain(len(stage_layers))
    num_stages = placement.num_stages
    usable = schedules if placement.is_plain else [name for name in schedules if name in OF_PARTS]
    schedule = rng.choice(usable)
    warmup = None
    if schedule == "1f1b" and pipelines and rng.random() < 0.3:
        longest = max((default_warmup(p.chunks, num_stages) for p in pipelines), key=sum)
        extra = rng.randint(0, 3)
        warmup = [forwards + extra for forwards in longest]
    num_chunks = sum(len(pipeline.chunks) for pipeline in pipelines)
    choose = {"none": lambda layers: 0, "all": lambda layers: layers, "random": lambda layers: rng.randint(0, layers)}
    rows = [[choose[recompute](layers) for _ in range(num_chunks)] for layers in stage_layers]
    if schedule in OF_PARTS and rng.random() < 0.3:
        warmup = [rng.randint(0, 4) for _ in range(num_stages)]
    return build_replica(pipelines, placement, schedule=schedule, warmup=warmup, recompute=rows)


def random_plan(
    rng: random.Random,
    lengths: Sequence[int],
    stage_layers: Sequence[int],
    *,
    max_slices: int = 5,
    recompute: str = "random",
    num_replicas: int = 1,
    placement: Placement | None = None,
    schedules: Sequence[str] = SCHEDULES,
) -> Plan:
    """A valid plan of a step; sequences are dealt to replicas at random, so that a replica may get none."""
    homes = [rng.randrange(num_replicas) for _ in lengths]
    replicas = tuple(
        random_replica(
            rng,
            lengths,
            [i for i, home in enumerate(homes) if home == replica],
            stage_layers,
            max_slices=max_slices,
            recompute=recompute,
            placement=placement,
            schedules=schedules,
        )
        for replica in range(num_replicas)
    )
    plan = Plan(tuple(stage_layers), tuple(lengths), replicas)
    plan.validate()
    return plan
