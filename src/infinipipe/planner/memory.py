"""Memory of every stage at every moment, from the action lists (section 4, note c).

At each action a stage holds its states; the activations of the chunks between forward and backward; key/value stores and
their gradients over their intervals; receives posted ahead; outputs whose transfer is not known to have ended; and what the
action itself needs while it runs. What a stage holds while it waits for the action's input is no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infinipipe.cost import CostModel, CostTable, tabulate
from infinipipe.cost.work import FloatArray
from infinipipe.plan import Action, Chunk, Plan, PlanError, ReplicaPlan, cut_sequences
from infinipipe.simulate.positions import Positions

IntArray = NDArray[np.int64]
MIB, GIB = 2**20, 2**30


class BudgetError(PlanError):
    """The memory budget is too small; ``required`` bytes at ``stage`` would do."""

    def __init__(self, required: int, budget: int, stage: int, advice: str, where: str = "") -> None:
        super().__init__(
            f"{where}needs about {readable_bytes(required)} per device at stage {stage}, got {readable_bytes(budget)}; "
            f"{advice}"
        )
        self.required = required
        self.budget = budget
        self.stage = stage
        self.advice = advice
        self.where = where

    def __reduce__(self) -> tuple[type[BudgetError], tuple[int, int, int, str, str]]:
        return type(self), (self.required, self.budget, self.stage, self.advice, self.where)


def readable_bytes(count: float) -> str:
    """Bytes in the largest unit that leaves at least 1, rounded up so that it still suffices."""
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if count >= unit:
            return f"{np.ceil(count / unit * 1000) / 1000:.3f} {name}"
    return f"{int(count)} bytes"


@dataclass(frozen=True)
class StageMemory:
    """One stage's memory at each of its actions as a function of recomputed layers.

    Attributes:
        layers: decoder layers of the stage.
        positions: the stage's actions.
        kept: (actions,) bytes at each action if nothing is recomputed.
        full: (actions,) the same if all layers of the action's own chunk, and nothing else, are recomputed.
        saving: (chunks,) bytes that each recomputed layer of a chunk frees from its forward to its backward.
    """

    layers: int
    positions: Positions
    kept: FloatArray
    full: FloatArray
    saving: FloatArray

    def freed(self, recompute: FloatArray | IntArray) -> FloatArray:
        """(actions,) bytes that ``recompute``, (chunks,) layers, frees at each action."""
        change = np.zeros(len(self.kept) + 1)
        amount = recompute * self.saving
        change[self.positions.forward_at] = amount
        change[self.positions.backward_at + 1] -= amount
        result: FloatArray = np.cumsum(change[:-1])
        return result

    def curve(self, recompute: FloatArray | IntArray) -> FloatArray:
        """(actions,) bytes at each action with ``recompute``, (chunks,) layers."""
        freed = self.freed(recompute)
        own = recompute[self.positions.chunk]
        others = freed - own * self.saving[self.positions.chunk]
        return np.where(own >= self.layers, self.full - others, self.kept - freed)

    def least(self) -> float:
        """The peak with everything recomputed, the least that a plan can count on."""
        if not len(self.kept):
            return 0.0
        freed = self.freed(np.full(len(self.saving), self.layers))
        own = self.layers * self.saving[self.positions.chunk]
        return float(np.maximum(self.kept - freed, self.full - freed + own).max())


def stage_memories(
    actions: Sequence[Sequence[Action]], chunks: Sequence[Chunk], table: CostTable, cost: CostModel
) -> list[StageMemory]:
    """The memory of every stage under its action list."""
    positions = [Positions.of(stage_actions) for stage_actions in actions]
    sizes = np.array([cost.message_bytes(chunk.num_tokens) for chunk in chunks], np.float64)
    return [
        _stage_memory(stage, positions, chunks, table, cost, sizes) if len(chunks) else _idle(stage, positions, table)
        for stage in range(len(actions))
    ]


def _idle(stage: int, positions: Sequence[Positions], table: CostTable) -> StageMemory:
    nothing = np.zeros(0)
    return StageMemory(table.stage_layers[stage], positions[stage], nothing, nothing, nothing)


def _stage_memory(
    stage: int,
    positions: Sequence[Positions],
    chunks: Sequence[Chunk],
    table: CostTable,
    cost: CostModel,
    sizes: FloatArray,
) -> StageMemory:
    own, layers, saving = positions[stage], table.stage_layers[stage], table.layer_saving[stage]
    added, freed = np.zeros((2, len(own.chunk)))
    added[own.forward_at] = table.activation[stage]
    freed[own.backward_at] = table.activation[stage]
    for held in cut_sequences(chunks).values():
        first, last = held[0], held[-1]
        store = cost.kv_bytes(chunks[first].slices[0].length, stage)
        gradients = cost.dkv_bytes(chunks[last].context, stage)
        added[own.forward_at[first]] += store
        added[own.backward_at[last]] += gradients
        freed[own.backward_at[first]] += store + gradients
    buffers, released = _messages(stage, positions, sizes)
    common = np.cumsum(added) - np.cumsum(freed) + freed + cost.state_bytes(stage) + buffers
    added[own.forward_at] -= layers * saving
    waiting = released - added

    def transient(forward: FloatArray, backward: FloatArray) -> FloatArray:
        running = np.where(own.is_forward, forward[stage][own.chunk], backward[stage][own.chunk])
        return np.maximum(running, waiting)

    kept = common + transient(table.forward_transient, table.backward_transient)
    full = common + transient(table.forward_transient_full, table.backward_transient_full)
    return StageMemory(layers, own, kept, full - layers * saving[own.chunk], saving)


def _messages(stage: int, positions: Sequence[Positions], sizes: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(actions,) bytes of messages while each action runs, and those held just before it beyond that.

    These are receives posted ahead, the gradient that a backward reads, and outputs that may be on their way. The input of
    a forward belongs to its activations once it runs.
    """
    own, last = positions[stage], len(positions) - 1
    held, released = np.zeros((2, len(own.chunk)))
    if stage > 0:
        held += _posted(own.is_forward, own.chunk, sizes)
        released += np.where(own.is_forward, sizes[own.chunk], 0.0)
        pinned, gone = _pinned(~own.is_forward, own, positions[stage - 1], positions[stage - 1].forward_at, sizes)
        held += pinned
        released += gone
    if stage < last:
        held += _posted(~own.is_forward, own.chunk, sizes)
        held += np.where(own.is_forward, 0.0, sizes[own.chunk])
        pinned, gone = _pinned(own.is_forward, own, positions[stage + 1], positions[stage + 1].backward_at, sizes)
        held += pinned
        released += gone
    return held, released


def _posted(uses: NDArray[np.bool_], chunk: IntArray, sizes: FloatArray) -> FloatArray:
    """Bytes of the next receive of one direction, posted when the use before it begins."""
    begun = np.cumsum(uses)
    ahead = np.append(sizes[chunk[uses]], 0.0)[begun]
    first = int(np.argmax(uses))
    ahead[: max(first - 1, 0)] = 0.0
    return ahead


def _pinned(
    sends: NDArray[np.bool_], own: Positions, neighbour: Positions, answers_at: IntArray, sizes: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Bytes of outputs of one direction that may be on their way at each action, and those known to be gone as it starts.

    This holds for links of any speed. ``sends`` marks the actions that send; ``answers_at`` is where the neighbour sends what
    the other actions wait for. The neighbour is known to have what it had read when it sent the last answer that this stage
    has read.
    """
    reads = neighbour.is_forward if sends[own.forward_at[0]] else ~neighbour.is_forward
    read = np.cumsum(reads)[answers_at]
    known = np.maximum.accumulate(np.where(sends, 0, read[own.chunk]))
    sent: IntArray = np.cumsum(sends) - sends
    total = np.concatenate(([0.0], np.cumsum(sizes[own.chunk[sends]])))
    gone = total[known]
    return total[sent] - gone, np.diff(gone, prepend=0.0)


def replica_peaks(replica: ReplicaPlan, cost: CostModel) -> list[int]:
    """Peak bytes of every stage under the replica's action lists and recompute."""
    table = tabulate(cost, replica.chunks)
    memories = stage_memories(replica.actions, replica.chunks, table, cost)
    return [
        round(float(memory.curve(np.array(row, np.int64)).max())) if row else cost.state_bytes(stage)
        for stage, (memory, row) in enumerate(zip(memories, replica.recompute, strict=True))
    ]


def check(plan: Plan, cost: CostModel, budget: int) -> list[list[int]]:
    """Prove that ``plan`` stays within ``budget`` bytes on every device at every moment.

    Returns the peak bytes as ``[replica][stage]``. Raises :class:`BudgetError`, which names the stage of the highest peak
    and that peak: the least budget under which this plan runs.
    """
    if plan.stage_layers != tuple(cost.stage_layers):
        raise PlanError(
            f"the plan has stages of {list(plan.stage_layers)} layers, the cost model of {list(cost.stage_layers)}"
        )
    peaks = [replica_peaks(replica, cost) for replica in plan.replicas]
    for index, stages in enumerate(peaks):
        worst = max(range(len(stages)), key=stages.__getitem__)
        if stages[worst] > budget:
            where = f"replica {index}: " if len(peaks) > 1 else ""
            raise BudgetError(
                stages[worst], budget, worst, "recompute more layers or cut more finely", where + "the plan "
            )
    return peaks
