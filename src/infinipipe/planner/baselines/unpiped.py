"""Step times of sequence parallelism without a pipeline, by the cost model alone: ``ulysses-zero3`` and ``flexsp``.

All ``d_p * d_s`` devices of a replica hold shards of the whole model (ZeRO-3), so every micro-batch pays the model's whole
fixed cost. A group of ``g`` devices computes its sequences ``g`` times as fast and exchanges activations over its own
all-to-all, the slower the larger the group. All groups of a micro-batch wait for the slowest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from infinipipe.cost import AnalyticCost, Holding, state_bytes
from infinipipe.cost.network import Network
from infinipipe.plan import PlanError

MOST_LAYOUTS = 40
"""Group layouts that ``flexsp`` tries for a micro-batch."""
MORE_MICRO_BATCHES = 4
"""How many micro-batches beyond the fewest possible are tried."""


@dataclass(frozen=True)
class Cluster:
    """The devices of a replica as sequence-parallel groups of any power of two.

    Attributes:
        cost: the model; its stages and sequence-parallel degree give the number of devices.
        network: their links, and what a micro-batch costs them.
        budget: bytes of each device, or ``None``.
    """

    cost: AnalyticCost
    network: Network
    budget: int | None

    @property
    def devices(self) -> int:
        return self.cost.num_stages * self.cost.sequence_parallel

    @property
    def degrees(self) -> list[int]:
        """Group sizes, descending."""
        return [1 << i for i in range(self.devices.bit_length() - 1, -1, -1) if self.devices % (1 << i) == 0]

    def token_capacity(self, degree: int) -> float:
        """Most tokens that a group holds at once."""
        if self.budget is None:
            return math.inf
        cost = self.cost
        layers = sum(cost.stage_layers)
        per_token = (cost.memory.layer + cost.memory.layer_kv) * layers + cost.memory.chunk + cost.memory.head
        return max(0.0, (self.budget - self.states) / per_token * degree)

    @cached_property
    def states(self) -> int:
        """Bytes of the model's states on a device."""
        cost = self.cost
        if cost.shape is None:
            return round(sum(cost.states) * cost.sequence_parallel / self.devices)
        sharded = Holding(
            element_bytes=round(cost.element_bytes),
            sequence_parallel=self.devices,
            gather_policy="release",
            gradient_policy="sharded",
        )
        return state_bytes(cost.shape, (cost.shape.layers,), None, sharded)[0]

    def exchange(self, degree: int) -> float:
        """Seconds per token of a group's all-to-alls, forward and backward."""
        if degree == 1:
            return 0.0
        sent = 2 * sum(self.cost.stage_layers) * self.cost.all_to_all_bytes / degree
        return sent / self.network.bandwidth(degree)


def ulysses_zero3(cluster: Cluster, lengths: Sequence[int]) -> float:
    """Step seconds with the best one degree for all: groups of equal size, micro-batches packed to a group's memory."""
    best = math.inf
    for degree in cluster.degrees:
        capacity = cluster.token_capacity(degree)
        if max(lengths) > capacity:
            continue
        groups = cluster.devices // degree
        rounds = max(1, math.ceil(sum(lengths) / (capacity * groups)))
        for number in range(rounds, rounds + MORE_MICRO_BATCHES):
            seconds = 0.0
            fits = True
            for batch in _deal(lengths, number):
                slowest = _assign(batch, [degree] * groups, cluster)
                fits = fits and slowest < math.inf
                seconds += slowest
            if fits:
                best = min(best, seconds + number * cluster.network.micro_batch_seconds)
    return _finite(best, cluster, lengths)


def flexsp(cluster: Cluster, lengths: Sequence[int]) -> float:
    """Step seconds with groups of unequal size, chosen for every micro-batch to minimise its slowest group.

    Micro-batches hold sequences of similar length, as the published solver makes them; layouts are tried from the smallest
    group that holds the longest sequence, the rest of the devices in equal smaller groups of at most two sizes.
    """
    capacity = cluster.token_capacity(1) * cluster.devices
    rounds = max(1, math.ceil(sum(lengths) / capacity)) if capacity > 0 else 1
    best = math.inf
    for number in range(rounds, rounds + MORE_MICRO_BATCHES):
        for batches in (_deal(lengths, number), _sorted_batches(lengths, number)):
            seconds = number * cluster.network.micro_batch_seconds
            for batch in batches:
                seconds += min(
                    (_assign(batch, layout, cluster) for layout in _layouts(batch, cluster)), default=math.inf
                )
                if seconds >= best:
                    break
            best = min(best, seconds)
    return _finite(best, cluster, lengths)


def _finite(seconds: float, cluster: Cluster, lengths: Sequence[int]) -> float:
    if math.isfinite(seconds):
        return seconds
    raise PlanError(
        f"a sequence of {max(lengths)} tokens does not fit {cluster.devices} devices without a pipeline; "
        "raise memory_budget or use more devices"
    )


def _deal(lengths: Sequence[int], number: int) -> list[list[int]]:
    """Sequences dealt by descending length to the micro-batch with the fewest tokens."""
    heap = [(0, i) for i in range(number)]
    batches: list[list[int]] = [[] for _ in range(number)]
    for length in sorted(lengths, reverse=True):
        tokens, i = heapq.heappop(heap)
        batches[i].append(length)
        heapq.heappush(heap, (tokens + length, i))
    return [batch for batch in batches if batch]


def _sorted_batches(lengths: Sequence[int], number: int) -> list[list[int]]:
    """Consecutive runs of the sorted lengths with about equal tokens."""
    target, tokens = sum(lengths) / number, 0
    batches: list[list[int]] = [[]]
    for length in sorted(lengths, reverse=True):
        if tokens >= target * len(batches) and len(batches) < number:
            batches.append([])
        batches[-1].append(length)
        tokens += length
    return batches


def _layouts(batch: Sequence[int], cluster: Cluster) -> list[list[int]]:
    """Group sizes, descending: one or more groups for the longest sequence, the rest in at most two smaller sizes."""
    longest = max(batch)
    layouts: list[list[int]] = []
    for first in cluster.degrees:
        if longest > cluster.token_capacity(first):
            continue
        count = 1
        while count * first <= cluster.devices and len(layouts) < MOST_LAYOUTS:
            rest = cluster.devices - count * first
            if rest == 0:
                layouts.append([first] * count)
            for second in cluster.degrees:
                if second < first and rest > 0 and rest % second == 0:
                    layouts.append([first] * count + [second] * (rest // second))
                    if rest // second > 1 and second > 1:
                        half = rest // second // 2
                        layouts.append(
                            [first] * count + [second] * (rest // second - half) + [second // 2] * (2 * half)
                        )
            count *= 2
    return layouts


def _assign(batch: Sequence[int], layout: Sequence[int], cluster: Cluster) -> float:
    """Seconds of the slowest group when sequences, longest first, go where they end earliest; infinite if they do not fit."""
    exchanges = {degree: cluster.exchange(degree) for degree in set(layout)}
    room = [cluster.token_capacity(degree) for degree in layout]
    by_degree: dict[int, list[tuple[float, int]]] = {}
    for index, degree in enumerate(layout):
        by_degree.setdefault(degree, []).append((0.0, index))
    slowest = 0.0
    for length in sorted(batch, reverse=True):
        best: tuple[float, int] | None = None
        computing = cluster.cost.compute_seconds([length])
        for degree, heap in by_degree.items():
            if heap and room[heap[0][1]] >= length:
                end = heap[0][0] + computing / degree + exchanges[degree] * length
                if best is None or end < best[0]:
                    best = (end, degree)
        if best is None:
            return math.inf
        end, degree = best
        _, index = heapq.heappop(by_degree[degree])
        room[index] -= length
        heapq.heappush(by_degree[degree], (end, index))
        slowest = max(slowest, end)
    return slowest
