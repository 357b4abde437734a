"""The dynamic program of Eq. 14 against all groupings."""

import itertools
import random

from infinipipe.planner.grouping import group, merge_small


def brute_force(count: int, price: dict[tuple[int, int], float], pipeline_price: float) -> float:
    best = float("inf")
    for marks in itertools.product([False, True], repeat=count - 1):
        edges = [0, *[i + 1 for i, mark in enumerate(marks) if mark], count]
        groups = list(itertools.pairwise(edges))
        best = min(best, sum(pipeline_price + price[g] for g in groups))
    return best


def test_the_dynamic_program_finds_the_best_grouping() -> None:
    rng = random.Random(3)
    for _ in range(200):
        count = rng.randint(1, 7)
        price = {(a, b): rng.random() * (b - a) ** 2 for a in range(count) for b in range(a + 1, count + 1)}
        delta = rng.random()
        groups = group(count, lambda a, b, price=price: price[a, b], delta)  # type: ignore[misc]
        assert [first for first, _ in groups] == [0, *[last for _, last in groups[:-1]]]
        assert groups[-1][1] == count
        total = sum(delta + price[g] for g in groups)
        assert abs(total - brute_force(count, price, delta)) < 1e-9


def test_small_neighbours_are_joined() -> None:
    assert merge_small([5, 1, 1, 9], 2) == [(0, 3), (3, 4)]
    assert merge_small([5, 1], 8) == [(0, 1), (1, 2)]
