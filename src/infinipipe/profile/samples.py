"""From runs to samples of the regression."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from infinipipe.plan import Plan
from infinipipe.profile.fit import Sample
from infinipipe.profile.timing import Run, stage_processes, undisturbed


def plan_samples(plan: Plan, runs: Sequence[Run], windows: Sequence[tuple[int, ...]] | None = None) -> list[Sample]:
    """One sample for every action of the first replica: the median over those of the plan's ``runs`` in which its stage was undisturbed.

    The halves of a backward make one more together, as if it had been whole. An action's seconds are the mean over the processes
    that share the stage. ``windows`` are those of the stages' layers. Every stage has one part.
    """
    replica = plan.replicas[0]
    program, samples = replica.program, []
    for stage, actions in enumerate(replica.actions):
        processes = stage_processes(stage, plan.num_stages, runs[0])
        chosen = undisturbed(runs, processes)
        halves: dict[tuple[str, int], list[Sample]] = {}
        for place, action in enumerate(actions):
            busy = [statistics.fmean(run.busy(process, place) for process in processes) for run in chosen]
            row = action.kind.row
            sample = Sample(
                column=row.cost,
                chunk=replica.chunks[action.chunk],
                layers=plan.stage_layers[stage],
                recomputed=replica.recompute[stage][action.chunk]
                if program.recomputes[program.base[stage] + place]
                else 0,
                is_first=stage == 0,
                is_last=stage == plan.num_stages - 1,
                seconds=statistics.median(busy),
                windows=() if windows is None else windows[stage],
                shards=len(processes),
                stage=stage,
                dropped=replica.recompute[stage][action.chunk] if row.keeps_input else 0,
            )
            samples.append(sample)
            if row.half_of is not None:
                halves.setdefault((row.half_of, action.chunk), []).append(sample)
        for (column, _), (first, *rest) in halves.items():
            seconds = first.seconds + sum(sample.seconds for sample in rest)
            samples.append(dataclasses.replace(first, column=column, seconds=seconds))
    return samples
