"""Recompute against brute force and against checks that share no code with the solver."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infinipipe.cost import AnalyticCost, ModelShape, flop_cost
from infinipipe.plan import ActionKind, Chunk, ReplicaPlan, Slice
from infinipipe.plan.ahead import forwards_ahead
from infinipipe.planner.chunking import SliceTime, balanced_chunking
from infinipipe.planner.draft import Draft
from infinipipe.planner.recompute import aggregated_bound
from infinipipe.planner.solvers import repair, solve, solve_exactly, solve_relaxation

SHAPE = ModelShape(layers=6, hidden=64, intermediate=192, heads=8, kv_heads=4, head_dim=8, vocab=100)


def cost_of(stage_layers: tuple[int, ...]) -> AnalyticCost:
    return flop_cost(
        SHAPE, stage_layers, element_bytes=4, flops_per_second=1e9, block_tokens=16, states=[0] * len(stage_layers)
    )


def draft_of(
    lengths: list[int], num_slices: int, stage_layers: tuple[int, ...], schedule: str = "1f1b", per_stage: float = 1.0
) -> Draft:
    slice_time = SliceTime(1e-6, 1e-3)
    chunking = balanced_chunking(lengths, range(len(lengths)), num_slices, slice_time, token_capacity=10**9)
    warmup = None if schedule == "1f1b" else forwards_ahead(len(stage_layers), per_stage)
    return Draft((chunking.ordered(),), cost_of(stage_layers), schedule, warmup)


def peak_by_ledger(replica: ReplicaPlan, cost: AnalyticCost, stage: int) -> int:
    """Peak bytes of a stage, action by action, from the cost model's scalar methods alone."""
    chunks, layers = replica.chunks, replica.recompute[stage]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, chunk in enumerate(chunks):
        if chunk.partial is not None:
            first.setdefault(chunk.partial.sequence, index)
            last[chunk.partial.sequence] = index
    actions, final = replica.actions[stage], replica.num_stages - 1
    peak = held = cost.state_bytes(stage)
    for place, action in enumerate(actions):
        chunk = chunks[action.chunk]
        forward = action.kind is ActionKind.FORWARD
        piece = chunk.partial
        peak = max(peak, held + _messages(replica, cost, stage, place, waiting=True))
        if forward:
            held += cost.activation_bytes(chunk, stage, layers[action.chunk])
            if piece is not None and first[piece.sequence] == action.chunk:
                held += cost.kv_bytes(piece.length, stage)
            needed = cost.transient_bytes("forward", chunk, stage, layers[action.chunk])
        else:
            if piece is not None and last[piece.sequence] == action.chunk:
                held += cost.dkv_bytes(piece.start, stage)
            # Charged for any number of kept layers as for one, of which the gradient of the embedding needs the most.
            total = cost.stage_layers[stage]
            recomputed = total if layers[action.chunk] == total else total - 1
            needed = cost.transient_bytes("backward", chunk, stage, recomputed)
            needed += cost.message_bytes(chunk.num_tokens) if stage < final else 0
        peak = max(peak, held + needed + _messages(replica, cost, stage, place, waiting=False))
        if not forward:
            held -= cost.activation_bytes(chunk, stage, layers[action.chunk])
            if piece is not None and first[piece.sequence] == action.chunk:
                held -= cost.kv_bytes(piece.length, stage)
                held -= cost.dkv_bytes(chunks[last[piece.sequence]].slices[0].start, stage)
    return peak


def _messages(replica: ReplicaPlan, cost: AnalyticCost, stage: int, place: int, *, waiting: bool) -> int:
    """Receives posted ahead, and outputs not known to have arrived, while ``actions[place]`` runs or waits for its input."""
    total = 0
    actions = replica.actions[stage]
    for kind, neighbour in ((ActionKind.FORWARD, stage - 1), (ActionKind.BACKWARD, stage + 1)):
        if not 0 <= neighbour < replica.num_stages:
            continue
        uses = [i for i, action in enumerate(actions) if action.kind is kind]
        begun = sum(i <= place for i in uses)
        if begun < len(uses) and place >= uses[0] - 1:
            total += cost.message_bytes(replica.chunks[actions[uses[begun]].chunk].num_tokens)
        answers = [i for i in uses if i < place + (not waiting)]
        if waiting and place in uses:
            total += cost.message_bytes(replica.chunks[actions[place].chunk].num_tokens)
        sends = [i for i, action in enumerate(actions) if action.kind is not kind and i < place]
        other = replica.actions[neighbour]
        known = 0
        for i in answers:
            sent_at = next(j for j, a in enumerate(other) if a.kind is kind and a.chunk == actions[i].chunk)
            known = max(known, sum(a.kind is not kind for a in other[:sent_at]))
        total += sum(cost.message_bytes(replica.chunks[actions[i].chunk].num_tokens) for i in sends[known:])
    return total


cases = st.tuples(
    st.lists(st.integers(1, 900), min_size=1, max_size=8),
    st.integers(1, 6),
    st.sampled_from([(6,), (3, 3), (2, 2, 2), (1, 3, 2)]),
    st.sampled_from([("1f1b", 1.0), ("tapered", 2.0), ("lookahead", 1.0)]),
    st.floats(0.0, 1.0),
)


@settings(max_examples=60, deadline=None)
@given(cases)
@example(([1], 1, (6,), ("1f1b", 1.0), 1.0))
def test_solutions_fit_by_an_independent_ledger(
    case: tuple[list[int], int, tuple[int, ...], tuple[str, float], float],
) -> None:
    lengths, num_slices, stages, (schedule, per_stage), share = case
    draft = draft_of(lengths, num_slices, stages, schedule, per_stage)
    cost = draft.cost
    assert isinstance(cost, AnalyticCost)
    most, (least, _) = max(draft.peaks(draft.uniform(0))), draft.least()
    budget = int(least + share * max(0.0, most - least))
    problem = draft.problem(budget)
    bound, _ = solve_relaxation(problem)
    assert aggregated_bound(problem) <= bound + 1e-6 * max(1.0, bound)
    for values in (solve(problem).values, repair(problem, np.zeros(problem.num_variables, np.int64))):
        recompute = problem.layers(values)
        assert problem.objective(values) >= bound - 1e-6 * max(1.0, bound)
        replica = draft.build(recompute)
        ledger = [peak_by_ledger(replica, cost, stage) for stage in range(len(stages))]
        np.testing.assert_allclose(draft.peaks(recompute), ledger, atol=len(draft.chunks) + 4)
        assert max(draft.peaks(recompute)) <= budget


SMALL = [
    ([400, 300, 90, 20], 3, (3, 3)),
    ([500, 60, 60, 30], 4, (2, 2, 2)),
    ([350, 330, 30], 2, (1, 3, 2)),
    ([200, 190, 180, 170], 1, (2, 4)),
]


@pytest.mark.parametrize(("lengths", "num_slices", "stages"), SMALL)
@pytest.mark.parametrize("share", [0.15, 0.4, 0.7])
def test_small_problems_are_solved_to_the_optimum_of_brute_force(
    lengths: list[int], num_slices: int, stages: tuple[int, ...], share: float
) -> None:
    draft = draft_of(lengths, num_slices, stages)
    assert len(draft.chunks) <= 8
    least, most = draft.least()[0], max(draft.peaks(draft.uniform(0)))
    budget = int(least + share * (most - least))
    problem = draft.problem(budget)
    optimum = min(
        sum(values)
        for values in itertools.product(range(problem.upper + 1), repeat=problem.num_variables)
        if (problem.rows.product(np.array(values)) >= problem.rows.demand - 0.5).all()
    )
    assert solve_exactly(problem).objective == optimum
    assert solve(problem).objective <= optimum + 1
    assert solve(problem).bound <= optimum + 1e-6


def test_sharing_diagonals_never_costs_less_than_free_choice() -> None:
    draft = draft_of([700, 400, 300, 80, 50, 20], 5, (2, 2, 2))
    least, most = draft.least()[0], max(draft.peaks(draft.uniform(0)))
    budget = int(least + 0.3 * (most - least))
    shared, free = draft.problem(budget), draft.problem(budget, share_diagonals=False)
    per_variable = np.bincount(shared.variable.ravel())
    layers_shared = float(per_variable @ solve_exactly(shared).values)
    assert solve_exactly(free).objective <= layers_shared
    assert free.num_variables == 3 * len(draft.chunks)


def test_one_chunk_alone_needs_its_layer_again() -> None:
    draft = Draft(((Chunk((Slice(0, 0, 500, 500),)),),), cost_of((6,)))
    everything = draft.peaks(draft.uniform(6))[0]
    all_but_one = draft.peaks(draft.uniform(5))[0]
    saving = draft.memories[0].saving[0]
    assert all_but_one - everything < saving / 2
