"""From runs to samples of the regression."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from infinipipe.plan import ActionKind, Plan
from infinipipe.profile.fit import Sample
from infinipipe.profile.timing import Run, stage_processes, undisturbed


def plan_samples(plan: Plan, runs: Sequence[Run], windows: Sequence[tuple[int, ...]] | None = None) -> list[Sample]:
    """One sample for every action of the first replica: the median over those of the plan's ``runs`` in which its stage was undisturbed.

    An action's seconds are the mean over the processes that share the stage. ``windows`` are those of the stages' layers.
    """
    replica = plan.replicas[0]
    samples = []
    for stage, actions in enumerate(replica.actions):
        processes = stage_processes(stage, plan.num_stages, runs[0])
        chosen = undisturbed(runs, processes)
        for place, action in enumerate(actions):
            busy = [statistics.fmean(run.busy(process, place) for process in processes) for run in chosen]
            recomputes = action.kind is ActionKind.BACKWARD
            samples.append(
                Sample(
                    kind=action.kind,
                    chunk=replica.chunks[action.chunk],
                    layers=plan.stage_layers[stage],
                    recomputed=replica.recompute[stage][action.chunk] if recomputes else 0,
                    is_first=stage == 0,
                    is_last=stage == plan.num_stages - 1,
                    seconds=statistics.median(busy),
                    windows=() if windows is None else windows[stage],
                    shards=len(processes),
                )
            )
    return samples
