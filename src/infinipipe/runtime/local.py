"""All stages of a pipeline in one process, in turn: for self-checks, tests and single devices."""

from __future__ import annotations

from collections.abc import Sequence

from infinipipe.plan import ReplicaPlan
from infinipipe.runtime.batch import Batch
from infinipipe.runtime.executor import Executor, StepResult


def step_locally(executors: Sequence[Executor], replica: ReplicaPlan, batch: Batch) -> list[StepResult]:
    """Run a step on executors whose transports :func:`~infinipipe.runtime.transport.connect` made.

    A stage runs until it needs a message that is not there yet; then the next one has its turn.
    """
    results = [StepResult() for _ in executors]
    runs = {i: e.iterate(replica, batch, results[i]) for i, e in enumerate(executors)}
    waiting = {stage: next(run, None) for stage, run in runs.items()}
    while any(incoming is not None for incoming in waiting.values()):
        progress = False
        for stage, incoming in waiting.items():
            while incoming is not None and incoming.ready():
                incoming = next(runs[stage], None)
                progress = True
            waiting[stage] = incoming
        if not progress:
            raise RuntimeError("the stages wait for each other; the plan was not validated")
    return results
