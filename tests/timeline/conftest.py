from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from infinipipe.cost import Link, ModelShape, even_stages, flop_cost
from infinipipe.plan import Chunk, Pipeline, ReplicaPlan, build_replica, cut, whole
from infinipipe.simulate import Simulation, simulate
from infinipipe.timeline import Timeline, measured_timeline

BUDGET = 3 * 2**30


@dataclass(frozen=True)
class Recorded:
    """An action as an executor records it."""

    action: str
    start: float
    end: float


@pytest.fixture(scope="session")
def replica() -> ReplicaPlan:
    """Two cut sequences, the second with a hybrid tail, and packed ones, on two stages, in two pipelines."""
    lengths = [9000, 5000, *(500 + 100 * i for i in range(8))]
    first = [Chunk((piece,)) for piece in cut(0, 9000, [3000, 5500, 7500])]
    *slices, tail = cut(1, 5000, [3000])
    second = [*(Chunk((piece,)) for piece in slices), Chunk((tail, *whole(lengths, [2, 3])))]
    packed = [Chunk(whole(lengths, [i, i + 1])) for i in range(4, 10, 2)]
    pipelines = [Pipeline((*first, *second)), Pipeline(tuple(packed))]
    recompute = [[2] * 6 + [0] * 3, [0] * 9]
    return build_replica(pipelines, 2, recompute=recompute)


@pytest.fixture(scope="session")
def simulation(replica: ReplicaPlan) -> Simulation:
    shape = ModelShape(layers=8, hidden=512, intermediate=1408, heads=8, kv_heads=4, head_dim=64, vocab=8000)
    link = Link(latency=2e-3, seconds_per_byte=1e-9)
    cost = flop_cost(shape, even_stages(8, 2), flops_per_second=1e12, chunk_seconds=5e-3, message=link)
    return simulate(replica, cost, budget=BUDGET)


@pytest.fixture(scope="session")
def simulated(simulation: Simulation) -> Timeline:
    return simulation.timeline


@pytest.fixture(scope="session")
def measured(replica: ReplicaPlan, simulated: Timeline) -> Timeline:
    """A step that took up to 5% longer than simulated, recorded from second 1000 of some clock."""
    noise = random.Random(7)
    events = []
    for row in simulated.spans:
        clock, recorded = 1000.0, []
        for span in row:
            clock = max(clock, 1000.0 + 1.05 * span.start)
            recorded.append(Recorded(str(span.action), clock, clock + span.seconds * noise.uniform(0.97, 1.04)))
            clock = recorded[-1].end
        events.append(recorded)
    memory = [[(1000.0 + 1.05 * seconds, size) for seconds, size in curve] for curve in simulated.memory]
    return measured_timeline(replica, events, memory=memory, budget=BUDGET, name="measured, step 3")
