"""``infinipipe rehearse PLAN COST``: run a plan with computing replaced by waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinipipe.cli.options import parse_options, require_output
from infinipipe.cli.simulate import choose_replica, named_cost
from infinipipe.plan import load
from infinipipe.settings import require_above, require_range
from infinipipe.simulate import simulate_plan
from infinipipe.timeline import save
from infinipipe.timeline.units import readable_seconds


@dataclass(frozen=True)
class RehearseOptions:
    """What to rehearse.

    Attributes:
        plan: the plan file; at most 16 stages.
        cost: a cost file, the name of a preset such as 7b-a100, or a cost model of one's own as path/to/file.py:function.
        sequence_parallel: devices of a stage, for a preset.
        replica: the data-parallel replica to rehearse; the slowest if not given.
        speed: how many times faster than modelled to run.
        output: where to write the measured timeline, which 'infinipipe timeline' draws.
    """

    plan: str
    cost: str
    sequence_parallel: int = 8
    replica: int | None = None
    speed: float = 1.0
    output: str | None = None

    def __post_init__(self) -> None:
        require_range("sequence_parallel", self.sequence_parallel, at_least=1)
        require_above("speed", self.speed, 0)
        require_output(self.output, (self.plan, self.cost))


def run(arguments: Sequence[str]) -> int:
    """Rehearse a replica of a plan and print what the executor itself costs."""
    description = "Run a plan's processes, messages and executor with computing replaced by waiting."
    options = parse_options(RehearseOptions, "rehearse", description, arguments)
    plan = load(options.plan)
    plan.validate()
    cost = named_cost(options.cost, plan, options.sequence_parallel)
    chosen = choose_replica(simulate_plan(plan, cost), options.replica)
    from infinipipe.rehearse import rehearse

    rehearsal = rehearse(plan.replicas[chosen], plan.lengths, cost, speed=options.speed)
    actions = sum(len(row) for row in rehearsal.timeline.spans)
    print(
        f"{actions} actions on {plan.num_stages} stages came to an end; without waiting in "
        f"{readable_seconds(rehearsal.bare_seconds)}"
    )
    print(
        f"step {readable_seconds(rehearsal.timeline.makespan)}, modelled {readable_seconds(rehearsal.modelled_seconds)}: "
        f"{rehearsal.overhead:.3f} (shortest action {readable_seconds(rehearsal.shortest_action)})"
    )
    if options.output is not None:
        save(rehearsal.timeline, options.output)
        print(f"timeline written to {options.output}; 'infinipipe timeline {options.output}' draws it")
    return 0
