"""Memory of every stage at every moment, from the action lists (section 4, note c).

At each action a stage holds its states; every resource over its intervals; receives posted ahead; outputs whose transfer is not
known to have ended; and what the action itself needs while it runs. What a stage holds while it waits for the action's input is
no more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infinipipe.cost import CostModel, CostTable
from infinipipe.cost.features import FloatArray
from infinipipe.plan import Plan, PlanError, Program, ReplicaPlan
from infinipipe.plan.kinds import ACTIVATIONS
from infinipipe.plan.program import AHEAD, Intervals
from infinipipe.simulate import require_same_stages
from infinipipe.timeline.units import readable_bytes

IntArray = NDArray[np.int64]


class BudgetError(PlanError):
    """The memory budget is too small; ``required`` bytes at ``stage`` would do."""

    def __init__(self, required: int, budget: int, stage: int, advice: str, where: str = "") -> None:
        super().__init__(
            f"{where}needs about {readable_bytes(required, round_up=True)} per device at stage {stage}, got "
            f"{readable_bytes(budget, round_up=True)}; {advice}"
        )
        self.required = required
        self.budget = budget
        self.stage = stage
        self.advice = advice
        self.where = where

    def __reduce__(self) -> tuple[type[BudgetError], tuple[int, int, int, str, str]]:
        return type(self), (self.required, self.budget, self.stage, self.advice, self.where)


@dataclass(frozen=True)
class StageMemory:
    """One stage's memory at each of its actions as a function of recomputed layers.

    A *holding* is a chunk's activations at one of the stage's parts: number ``p * chunks + chunk`` at the stage's ``p``-th part.

    Attributes:
        stage: which stage.
        parts: its parts.
        layers: (holdings,) decoder layers of its part.
        first, last: (holdings,) the places of the actions that acquire and release it.
        saving: (holdings,) bytes that each recomputed layer frees from the first to the last.
        own: (actions,) the holding of the action's chunk and part.
        is_held: (actions,) whether that is held while the action runs.
        kept: (actions,) bytes at each action if nothing is recomputed.
        full: (actions,) the same if all layers of the action's own holding, and nothing else, are recomputed.
        full_from: (actions,) recomputed layers of the own holding from which on ``full`` is a limit: all, or 1 where what the
            action leaves behind piles up while it runs.
    """

    stage: int
    parts: tuple[int, ...]
    layers: IntArray
    first: IntArray
    last: IntArray
    saving: FloatArray
    own: IntArray
    is_held: NDArray[np.bool_]
    kept: FloatArray
    full: FloatArray
    full_from: IntArray

    def of(self, recompute: IntArray) -> IntArray:
        """(holdings,) of the stage, from (parts, chunks) of all."""
        return recompute[list(self.parts)].ravel()

    def freed(self, recompute: FloatArray | IntArray) -> FloatArray:
        """(actions,) bytes that ``recompute``, (holdings,) layers, frees at each action."""
        change = np.zeros(len(self.kept) + 1)
        amount = recompute * self.saving
        change[self.first] = amount
        change[self.last + 1] -= amount
        result: FloatArray = np.cumsum(change[:-1])
        return result

    def curve(self, recompute: FloatArray | IntArray) -> FloatArray:
        """(actions,) bytes at each action with ``recompute``, (holdings,) layers."""
        freed = self.freed(recompute)
        own = recompute[self.own]
        others = freed - np.where(self.is_held, own * self.saving[self.own], 0.0)
        everything = own >= self.layers[self.own]
        some = np.where(everything, -np.inf, self.kept - freed)
        limited = everything | (own >= self.full_from)
        return np.where(limited & self.is_held, np.maximum(some, self.full - others), self.kept - freed)

    def least(self) -> float:
        """The peak with everything recomputed, the least that a plan can count on."""
        if not len(self.kept):
            return 0.0
        freed = self.freed(self.layers)
        own = np.where(self.is_held, self.layers[self.own] * self.saving[self.own], 0.0)
        return float(np.maximum(self.kept - freed, self.full - freed + own).max())


def stage_memories(program: Program, table: CostTable, cost: CostModel) -> list[StageMemory]:
    """The memory of every stage under its action list."""
    if not program.num_actions:
        return [_idle(stage, program) for stage in range(program.num_stages)]
    layers_of, states = (
        np.array(x) for x in (table.stage_layers, [cost.state_bytes(stage) for stage in range(program.num_stages)])
    )
    added, freed = np.zeros((2, program.num_actions))
    for intervals in program.intervals:
        size = table.held[intervals.resource.name][intervals.part, intervals.chunk]
        added[intervals.first + intervals.resource.from_end] += size
        freed[intervals.last] += size
    buffers, released = _messages(program, table.message_bytes)
    common = np.cumsum(added) - np.cumsum(freed) + freed + states[program.stage] + buffers
    activations = program.intervals_of(ACTIVATIONS)
    most_freed = table.layer_saving * layers_of[:, None]
    added[activations.first] -= most_freed[activations.part, activations.chunk]
    waiting = released - added
    kept = common + np.maximum(program.by_kind(lambda column: table.transient[column][0]), waiting)
    full = common + np.maximum(program.by_kind(lambda column: table.transient[column][1]), waiting)
    full -= most_freed[program.part, program.chunk]
    held = _is_held(program, activations)
    by_action = _ByAction(
        held,
        kept,
        np.where(held, full, -np.inf),
        np.where(program.rows("leaves_behind"), 1, layers_of[program.part]),
    )
    return [_stage_memory(stage, program, table, activations, by_action) for stage in range(program.num_stages)]


@dataclass(frozen=True)
class _ByAction:
    """What :class:`StageMemory` has by action, of all stages."""

    is_held: NDArray[np.bool_]
    kept: FloatArray
    full: FloatArray
    full_from: IntArray


def _is_held(program: Program, activations: Intervals) -> NDArray[np.bool_]:
    """(actions,) whether the activations of the action's chunk at its part are held while it runs."""
    first, last = np.full((2, program.num_parts, len(program.chunks)), -1)
    first[activations.part, activations.chunk] = activations.first
    last[activations.part, activations.chunk] = activations.last
    numbers, place = np.arange(program.num_actions), (program.part, program.chunk)
    result: NDArray[np.bool_] = (first[place] <= numbers) & (numbers <= last[place])
    return result


def _idle(stage: int, program: Program) -> StageMemory:
    none, nothing = np.zeros(0, np.int64), np.zeros(0)
    return StageMemory(
        stage, program.placement.parts[stage], none, none, none, nothing, none, none > 0, nothing, nothing, none
    )


def _stage_memory(
    stage: int,
    program: Program,
    table: CostTable,
    activations: Intervals,
    by_action: _ByAction,
) -> StageMemory:
    begin, end = program.base[stage], program.base[stage + 1]
    parts, count = program.placement.parts[stage], len(program.chunks)
    place_of = np.zeros(program.num_parts, np.int64)
    place_of[list(parts)] = np.arange(len(parts))
    own = (activations.first >= begin) & (activations.first < end)
    first, last = np.zeros((2, len(parts) * count), np.int64)
    holding = place_of[activations.part[own]] * count + activations.chunk[own]
    first[holding], last[holding] = activations.first[own] - begin, activations.last[own] - begin
    return StageMemory(
        stage=stage,
        parts=parts,
        layers=np.repeat(np.array([table.stage_layers[part] for part in parts]), count),
        first=first,
        last=last,
        saving=table.layer_saving[list(parts)].ravel(),
        own=place_of[program.part[begin:end]] * count + program.chunk[begin:end],
        is_held=by_action.is_held[begin:end],
        kept=by_action.kept[begin:end],
        full=by_action.full[begin:end],
        full_from=by_action.full_from[begin:end],
    )


def _messages(program: Program, sizes: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(actions,) bytes of messages while each action runs, and those held just before it beyond that.

    These are receives posted ahead, inputs that an action reads and does not keep, outputs that may be on their way, and what
    parts of one stage have handed over. An input that is kept belongs to what the action holds once it runs.
    """
    held, released = np.zeros((2, program.num_actions))
    keeps = program.rows("keeps_input")

    def add_inputs(takers: IntArray) -> None:
        size = sizes[program.chunk[takers]]
        kept = keeps[takers]
        released[takers[kept]] += size[kept]
        held[takers[~kept]] += size[~kept]

    for _, makers, takers in program.links:
        total = np.concatenate(([0.0], np.cumsum(sizes[program.chunk[takers]])))
        target = _actions_of(program, takers)
        held[target] += _posted(target, takers, total)
        add_inputs(takers)
        source = _actions_of(program, makers)
        pinned, gone = _pinned(program, source, makers, takers, total)
        held[source] += pinned
        released[source] += gone
    for channel in np.flatnonzero(program.local).tolist():
        takers = np.flatnonzero(program.takes == channel)
        change = np.zeros(program.num_actions + 1)
        change[program.source[takers] + 1] += sizes[program.chunk[takers]]
        change[takers] -= sizes[program.chunk[takers]]
        held += np.cumsum(change[:-1])
        add_inputs(takers)
    return held, released


def _actions_of(program: Program, some: IntArray) -> slice:
    """The actions of the stage of ``some``."""
    stage = int(program.stage[some[0]])
    return slice(program.base[stage], program.base[stage + 1])


def _posted(stage: slice, takers: IntArray, total: FloatArray) -> FloatArray:
    """Bytes of the receives of one channel posted ahead, at every action of the stage that takes its messages.

    The receive of a use is posted when the stage comes to the use ``AHEAD`` before it, that of the first one action ahead::

        takers               .  .  T0 .  .  T1 .  T2
        posted, AHEAD = 1       0  1  1  1  2  2         the next use at each action, from the one before T0 on
    """
    numbers = np.arange(stage.start, stage.stop)
    begun = np.searchsorted(takers, numbers, side="right")
    ahead = total[np.minimum(begun + AHEAD, len(takers))] - total[begun]
    ahead[numbers < takers[0] - 1] = 0.0
    return ahead


def _pinned(
    program: Program, stage: slice, makers: IntArray, takers: IntArray, total: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Bytes of outputs of one channel that may be on their way at each action, and those known to be gone as it starts.

    This holds for links of any speed. An output is pinned until its transfer ends, of which the sender hears nothing. But what it
    reads from the other stage, on any channel, was made by an action there that came after others, which had read messages::

        sender     F0 F1 F2 . B0 . B1         at B0 the receiver is known to have read F0: F1 and F2 are pinned
        receiver    . F0 . B0 F1 . B1         at B1, F1 too
    """
    numbers = np.arange(stage.start, stage.stop)
    source = program.source[stage]
    other = program.stage[takers[0]]
    answers = (source >= 0) & (program.stage[source] == other)
    read = np.where(answers, np.searchsorted(takers, source, side="right"), 0)
    gone = total[np.maximum.accumulate(read)]
    sent = np.searchsorted(makers, numbers, side="left")
    return total[sent] - gone, np.diff(gone, prepend=0.0)


def replica_peaks(replica: ReplicaPlan, cost: CostModel) -> list[int]:
    """Peak bytes of every stage under the replica's action lists and recompute."""
    memories = stage_memories(replica.program, cost.table(replica.chunks), cost)
    if not replica.chunks:
        return [cost.state_bytes(memory.stage) for memory in memories]
    recompute = np.array(replica.recompute, np.int64)
    return [round(float(memory.curve(memory.of(recompute)).max())) for memory in memories]


def check(plan: Plan, cost: CostModel, budget: int) -> list[list[int]]:
    """Prove that ``plan`` stays within ``budget`` bytes on every device at every moment.

    Returns the peak bytes as ``[replica][stage]``. Raises :class:`BudgetError`, which names the stage of the highest peak
    and that peak: the least budget under which this plan runs.
    """
    if plan.stage_layers != tuple(cost.stage_layers):
        raise PlanError(
            f"the plan has stages of {list(plan.stage_layers)} layers, the cost model of {list(cost.stage_layers)}"
        )
    for replica in plan.replicas:
        require_same_stages(replica, cost)
    peaks = [replica_peaks(replica, cost) for replica in plan.replicas]
    for index, stages in enumerate(peaks):
        worst = max(range(len(stages)), key=stages.__getitem__)
        if stages[worst] > budget:
            where = f"replica {index}: " if len(peaks) > 1 else ""
            raise BudgetError(
                stages[worst], budget, worst, "recompute more layers or cut more finely", where + "the plan "
            )
    return peaks
