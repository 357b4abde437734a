"""The rehearsal of one replica: one process a stage, the real executor and messages, modelled times of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from infinipipe.cost import CostModel, tabulate
from infinipipe.cost.work import FloatArray
from infinipipe.model import IGNORE
from infinipipe.plan import PlanError, ReplicaPlan
from infinipipe.rehearse.stage import WaitingStage, Waits
from infinipipe.rehearse.transport import MessageSeconds, ModelledTransport
from infinipipe.runtime import Batch, Event, Executor, Parameters, ProcessGroupTransport, Recorder, pair_groups
from infinipipe.runtime.pool import WorkerPool
from infinipipe.runtime.transport import PairGroups
from infinipipe.settings import SettingError, require_above
from infinipipe.simulate import Engine
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
    if len(cost.stage_layers) != num_stages:
        raise PlanError(
            f"the plan has {num_stages} stages, but the cost model describes {len(cost.stage_layers)}; "
            "use a cost model of the same stages"
        )
    table = tabulate(cost, replica.chunks)
    backward = table.backward + table.recompute_seconds(replica.recompute)
    forward, backward = table.forward / speed, backward / speed
    message = table.message / speed
    modelled = Engine(replica).makespan(forward, backward, message)
    if pool is None:
        with WorkerPool(num_stages, timeout=SHORTEST_TIMEOUT + 2 * modelled) as own:
            return _rehearse(replica, lengths, (forward, backward, message), modelled, own)
    return _rehearse(replica, lengths, (forward, backward, message), modelled, pool)


def _rehearse(
    replica: ReplicaPlan,
    lengths: Sequence[int],
    times: tuple[FloatArray, FloatArray, FloatArray],
    modelled: float,
    pool: WorkerPool,
) -> Rehearsal:
    forward, backward, message = times
    sizes = [chunk.num_tokens for chunk in replica.chunks]
    waits: list[Waits] = [
        dict(zip(replica.chunks, zip(f.tolist(), b.tolist(), strict=True), strict=True))
        for f, b in zip(forward, backward, strict=True)
    ]
    pool.run(_connect, replica.num_stages)
    ranks = range(replica.num_stages)
    everything = waits, dict(zip(sizes, message.tolist(), strict=True))
    nothing: tuple[list[Waits], MessageSeconds] = [{}] * replica.num_stages, {}
    bare, waited = (
        measured_timeline(
            replica, pool.run(_run_stage, replica, tuple(lengths), *waiting, ranks=ranks), name="rehearsed"
        )
        for waiting in (nothing, everything)
    )
    shortest = min(float(forward.min(initial=math.inf)), float(backward.min(initial=math.inf)))
    return Rehearsal(waited, modelled, bare.makespan, shortest)


@lru_cache(maxsize=4)
def _groups(num_stages: int) -> tuple[PairGroups, dist.ProcessGroup]:
    """A worker's communicators, and the group of all stages; a collective of all workers."""
    ranks = range(num_stages)
    return pair_groups([ranks]), dist.new_group(list(ranks))


def _connect(rank: int, num_stages: int) -> None:
    """A worker's part in making the communicators."""
    _groups(num_stages)


def _run_stage(
    rank: int, replica: ReplicaPlan, lengths: tuple[int, ...], waits: Sequence[Waits], messages: MessageSeconds
) -> list[Event]:
    """A worker's part: run the step as stage ``rank``, with all stages starting at once."""
    stage = WaitingStage(rank, replica.num_stages, waits[rank])
    pairs, everyone = _groups(replica.num_stages)
    transport = ModelledTransport(ProcessGroupTransport(range(replica.num_stages), pairs), messages)
    executor = Executor(stage, transport, Parameters(stage))
    zero, unsupervised = torch.zeros(1, dtype=torch.int64), torch.full((1,), IGNORE)
    batch = Batch([zero.expand(length) for length in lengths], [unsupervised.expand(length) for length in lengths])
    dist.barrier(group=everyone)
    recorder = Recorder(stage.device)
    executor.step(replica, batch, recorder=recorder)
    return recorder.events()
