"""How the processes of a job agree, on two real processes."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from infinipipe.train.launch import launch

PROGRAM = """
import json, os, sys
from dataclasses import replace
import torch
from infinipipe.plan import Pipeline, Chunk, Plan, build_replica, cut, whole
from infinipipe.runtime import Batch
from infinipipe.train.job import Job, OnFirst
from infinipipe.train.environment import read_environment
from infinipipe.train.errors import StoppedElsewhereError
from infinipipe.train.loader import PlannedBatch
from infinipipe.train.settings import ParallelSettings

job = Job.start(read_environment(os.environ), ParallelSettings(stages=2, threads=2, device="cpu"))
seen = {"threads": torch.get_num_threads(), "device": str(job.device)}
seen["on_first"] = job.on_first(lambda: f"from {job.rank}")

def refuse_on(ranks):
    def work():
        if job.rank in ranks:
            raise ValueError(f"no, says {job.rank}")
        return job.rank
    return work

for name, call in {"first": lambda: job.on_first(refuse_on([0])), "everywhere": lambda: job.everywhere(refuse_on([1]))}.items():
    try:
        call()
    except (ValueError, StoppedElsewhereError) as error:
        seen[name] = f"{type(error).__name__}: {error}"
seen["fine"] = job.everywhere(refuse_on([]))
seen["objects"] = job.gather_objects({"rank": job.rank})

def make():
    assert job.rank == 0
    pieces = [Chunk((piece,)) for piece in cut(0, 5, [2])] + [Chunk(whole((5, 3), [1]))]
    plan = Plan((1, 1), (5, 3), (build_replica([Pipeline(tuple(pieces))], 2),), {"name": "by hand"})
    batch = Batch.from_tokens([torch.arange(5), torch.arange(3)])
    return PlannedBatch(Batch(batch.tokens, batch.labels, [torch.full((5,), 0.5), torch.full((3,), 2.0)]), plan)

planned = job.on_first(make)
plan, batch = planned.plan, planned.batch
plan.validate()
seen["plan"] = [plan.hash, plan.lengths, dict(plan.metadata)]
seen["batch"] = [[row.tolist() for row in rows] for rows in (batch.tokens, batch.labels, batch.weights)] + [batch.num_supervised, batch.total_weight]

def make_list():
    assert job.rank == 0
    return [1, 2]

owned = OnFirst.make(job, make_list)
owned.tell(lambda numbers: numbers.append(job.rank + 3))
seen["asked"] = owned.ask(lambda numbers: numbers)
seen["then"] = owned.then(lambda numbers: [job.rank, *numbers]).ask(len)
def fail(numbers):
    raise ValueError(f"no, say {numbers}")
for name, call in {"ask": owned.ask, "then_fails": owned.then}.items():
    try:
        call(fail)
    except (ValueError, StoppedElsewhereError) as error:
        seen[name] = f"{type(error).__name__}: {error}"
try:
    job.stop(ValueError("all know why"))
except (ValueError, StoppedElsewhereError) as error:
    seen["stop"] = f"{type(error).__name__}: {error}"
job.check_equal("abc", "this")
try:
    job.check_equal(f"{job.rank:064x}"[::-1], "the plan")
except RuntimeError as error:
    seen["unequal"] = str(error)
open(f"{sys.argv[1]}/{job.rank}.json", "w").write(json.dumps(seen))
job.close()
"""


def test_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)]
    assert launch(command, 2, tmp_path / "logs", name=str) == 0, (tmp_path / "logs" / "rank1.log").read_text()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert (first["threads"], first["device"]) == (2, "cpu")
    assert first["on_first"] == second["on_first"] == "from 0"
    assert first["first"] == "ValueError: no, says 0"
    assert second["first"] == "StoppedElsewhereError: rank 0 stopped: no, says 0"
    assert first["everywhere"] == "StoppedElsewhereError: rank 1 stopped: no, says 1"
    assert second["everywhere"] == "ValueError: no, says 1"
    assert (first["fine"], second["fine"]) == (0, 1)
    assert first["objects"] == second["objects"] == [{"rank": 0}, {"rank": 1}]
    assert first["plan"] == second["plan"]
    assert first["plan"][1:] == [[5, 3], {"name": "by hand"}]
    assert first["batch"] == second["batch"]
    assert first["batch"] == [
        [[0, 1, 2, 3, 4], [0, 1, 2]],
        [[1, 2, 3, 4, -100], [1, 2, -100]],
        [[0.5] * 5, [2.0] * 3],
        6,
        6.0,
    ]
    assert first["asked"] == second["asked"] == [1, 2, 3]
    assert first["then"] == second["then"] == 4
    for name in ("ask", "then_fails"):
        assert first[name] == "ValueError: no, say [1, 2, 3]"
        assert second[name] == "StoppedElsewhereError: rank 0 stopped: no, say [1, 2, 3]"
    assert first["stop"] == "ValueError: all know why"
    assert second["stop"] == "StoppedElsewhereError: rank 0 stopped: all know why"
    assert "disagree on the plan" in first["unequal"]
    assert "disagree on the plan" in second["unequal"]
