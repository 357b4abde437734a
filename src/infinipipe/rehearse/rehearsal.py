"""The rehearsal of one replica: one process a stage, the real executor and messages, modelled times of both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist

from infinipipe.cost import CostModel
from infinipipe.cost.features import FloatArray
from infinipipe.cost.table import Columns
from infinipipe.model import IGNORE
from infinipipe.plan import Chunk, Placement, ReplicaPlan
from infinipipe.rehearse.stage import WaitingStage, Waits
from infinipipe.rehearse.transport import MessageSeconds, ModelledTransport
from infinipipe.runtime import Batch, Event, Executor, ProcessGroupTransport, Recorder, channel_groups
from infinipipe.runtime.pool import WorkerPool
from infinipipe.runtime.transport import ChannelGroups
from infinipipe.settings import SettingError, require_above
from infinipipe.simulate import Engine, require_same_stages
from infinipipe.timeline import Timeline, measured_timeline

MAX_STAGES = 16
"""Most stages, each a process of its own."""
SHORTEST_TIMEOUT = 60.0


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal has shown.

    Attributes:
        timeline: the measured step.
        modelled_seconds: the same step simulated.
        bare_seconds: the step without any waiting: all that the executor, its messages and processes cost, one after another
            on this machine's cores.
        shortest_action: the least modelled seconds of any action.
    """

    timeline: Timeline
    modelled_seconds: float
    bare_seconds: float
    shortest_action: float

    @property
    def overhead(self) -> float:
        """Measured over modelled makespan; NaN if nothing was to be waited for."""
        return self.timeline.makespan / self.modelled_seconds if self.modelled_seconds > 0 else float("nan")


def rehearse(
    replica: ReplicaPlan, lengths: Sequence[int], cost: CostModel, *, speed: float = 1.0, pool: WorkerPool | None = None
) -> Rehearsal:
    """Run ``replica`` with one process a stage, actions and messages taking their modelled time divided by ``speed``.

    It runs without waiting first. ``lengths`` are those of the plan; ``pool``, if given, has at least as many workers as the
    plan has stages. Raises ``PlanError`` for stages that differ from the cost model's, ``SettingError`` for more than
    ``MAX_STAGES``, ``WorkerError`` if the stages do not come to an end.
    """
    require_above("speed", speed, 0)
    num_stages = replica.num_stages
    if num_stages > MAX_STAGES:
        raise SettingError(f"the plan has {num_stages} stages; a rehearsal runs at most {MAX_STAGES} on one machine")
    require_same_stages(replica, cost)
    table = cost.table(replica.chunks)
    message = table.message / speed
    seconds = Columns(lambda column: table.seconds[column] / speed)
    recompute = table.recompute_seconds(replica.recompute) / speed
    engine = Engine(replica)
    modelled = engine.makespan(seconds, message, recompute)
    shortest = min(engine.durations(seconds, recompute), default=math.inf)
    waits = _waits(replica, seconds, recompute)
    messages = dict(zip((chunk.num_tokens for chunk in replica.chunks), message.tolist(), strict=True))
    if pool is None:
        with WorkerPool(num_stages, timeout=SHORTEST_TIMEOUT + 2 * modelled) as own:
            bare, waited = _rehearse(replica, lengths, waits, messages, own)
    else:
        bare, waited = _rehearse(replica, lengths, waits, messages, pool)
    return Rehearsal(waited, modelled, bare.makespan, shortest)


def _waits(replica: ReplicaPlan, seconds: Mapping[str, FloatArray], recompute: FloatArray) -> Waits:
    """What every chunk waits for at every part, by the columns of its actions."""
    program = replica.program
    durations = program.by_kind(seconds.__getitem__)
    durations += np.where(program.recomputes, recompute[program.part, program.chunk], 0.0)
    waits: dict[tuple[int, Chunk], dict[str, float]] = {}
    for number, duration in enumerate(durations.tolist()):
        place = int(program.part[number]), replica.chunks[int(program.chunk[number])]
        waits.setdefault(place, {})[program.of(number).kind.row.cost] = duration
    return waits


def _rehearse(
    replica: ReplicaPlan, lengths: Sequence[int], waits: Waits, messages: MessageSeconds, pool: WorkerPool
) -> tuple[Timeline, Timeline]:
    """The step without and with waiting."""
    pool.run(_connect, replica.num_stages, replica.placement)
    ranks = range(replica.num_stages)
    nothing: tuple[Waits, MessageSeconds] = {}, {}
    bare, waited = (
        measured_timeline(
            replica, pool.run(_run_stage, replica, tuple(lengths), *waiting, ranks=ranks), name="rehearsed"
        )
        for waiting in (nothing, (waits, messages))
    )
    return bare, waited


@lru_cache(maxsize=4)
def _groups(num_stages: int, placement: Placement) -> tuple[ChannelGroups, dist.ProcessGroup]:
    """A worker's communicators, and the group of all stages; a collective of all workers."""
    ranks = range(num_stages)
    return channel_groups([ranks], placement), dist.new_group(list(ranks))


def _connect(rank: int, num_stages: int, placement: Placement) -> None:
    """A worker's part in making the communicators."""
    _groups(num_stages, placement)


def _run_stage(
    rank: int, replica: ReplicaPlan, lengths: tuple[int, ...], waits: Waits, messages: MessageSeconds
) -> list[Event]:
    """A worker's part: run the step as stage ``rank``, with all stages starting at once."""
    placement = replica.placement
    stage = WaitingStage(placement.parts[rank], placement.num_parts, waits)
    channels, everyone = _groups(replica.num_stages, placement)
    transport = ModelledTransport(ProcessGroupTransport(range(replica.num_stages), channels, placement), messages)
    executor = Executor(stage, transport, stage.weights)
    zero, unsupervised = torch.zeros(1, dtype=torch.int64), torch.full((1,), IGNORE)
    batch = Batch([zero.expand(length) for length in lengths], [unsupervised.expand(length) for length in lengths])
    dist.barrier(group=everyone)
    recorder = Recorder(stage.device)
    executor.step(replica, batch, recorder=recorder)
    return recorder.events()
