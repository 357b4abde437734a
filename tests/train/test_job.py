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
from infinipipe.plan import Pipeline, Chunk, Plan, build_replica, cut
from infinipipe.runtime import Batch
from infinipipe.train.job import Job
from infinipipe.train.place import find_place
from infinipipe.train.report import StoppedElsewhereError
from infinipipe.train.settings import ParallelSettings

job = Job.start(find_place(os.environ), ParallelSettings(stages=2, threads=2, device="cpu"))
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
    replica = build_replica([Pipeline(tuple(Chunk((piece,)) for piece in cut(0, 5, [2])))], 2)
    return Plan((1, 1), (5,), (replica,)), Batch.from_tokens([torch.arange(5)])

plan, batch = job.share_step(make)
seen["plan"] = [plan.hash, plan.lengths, batch.tokens[0].tolist(), batch.labels[0].tolist(), batch.num_supervised]
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
    assert first["plan"][1:] == [[5], [0, 1, 2, 3, 4], [1, 2, 3, 4, -100], 4]
    assert "disagree on the plan" in first["unequal"]
    assert "disagree on the plan" in second["unequal"]
