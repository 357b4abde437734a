"""What the executor itself costs: steps of 8 and 16 stages on this machine, their computing replaced by waiting.

Every stage is a process with the real executor and real messages. Plans are those of the published method for a 7B model and
lengths of a skewed distribution; times are sped up until the shortest action waits for 20 ms. The measured step is set
against the simulated one, the best of a few tries: what disturbs a try only adds to it. The last line printed is a JSON
object: ``overhead_8`` and ``overhead_16`` are those ratios, ``bare_8`` and ``bare_16`` the milliseconds per action of the same
steps without any waiting, divided by all stages: how little an action can take before the executor shows.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from infinipipe.cost.presets import preset
from infinipipe.planner import PlannerSettings, plan_step
from infinipipe.rehearse import rehearse
from infinipipe.runtime.pool import WorkerPool

SHORTEST_SECONDS = 0.02
CONTEXT = 48_000


def measure(stages: int, sequences: int, tries: int) -> dict[str, float]:
    """Rehearse a plan of so many stages."""
    cost = preset("7b-a100", stages)
    drawn = np.exp(np.random.default_rng(0).normal(7.0, 1.63, sequences))
    lengths: list[int] = np.clip(drawn, 1, CONTEXT).astype(int).tolist()
    settings = PlannerSettings(planner="elastic-paper", num_slices=4)
    replica = plan_step(lengths, cost, settings).replicas[0]
    table = cost.table(replica.chunks)
    speed = float(min(table.seconds["forward"].min(), table.seconds["backward"].min())) / SHORTEST_SECONDS
    num_actions = sum(map(len, replica.actions))
    with WorkerPool(stages) as pool:
        rehearsals = [rehearse(replica, lengths, cost, speed=speed, pool=pool) for _ in range(tries)]
    best = min(rehearsals, key=lambda rehearsal: rehearsal.overhead)
    bare = min(rehearsal.bare_seconds for rehearsal in rehearsals) / num_actions
    print(
        f"{stages} stages, {len(replica.chunks)} chunks, {num_actions} actions of {best.shortest_action * 1e3:.0f} ms and more: "
        f"step {best.timeline.makespan:.3f} s, simulated {best.modelled_seconds:.3f} s, ratio {best.overhead:.4f}; "
        f"all tries {', '.join(f'{r.overhead:.4f}' for r in rehearsals)}",
        flush=True,
    )
    return {f"overhead_{stages}": best.overhead, f"bare_{stages}": bare * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measured over simulated makespan with computing replaced by waiting.")
    parser.add_argument("--quick", action="store_true", help="fewer chunks and tries; under 50 s on two cores")
    quick = parser.parse_args().quick
    started = time.monotonic()
    result = measure(8, 128 if quick else 512, 2 if quick else 5) | measure(
        16, 128 if quick else 512, 2 if quick else 5
    )
    print(json.dumps(result | {"seconds": time.monotonic() - started}))


if __name__ == "__main__":
    main()
