"""The launcher on small programs: clean ends, deaths, users' errors, hanging survivors, interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from infinipipe.train.errors import ErrorReport
from infinipipe.train.launch import Failure, _Interruption, launch, root_cause

PROLOGUE = """
import os, sys, time, signal
from infinipipe.train.errors import StoppedElsewhereError, run_reported
rank = int(os.environ["RANK"])
"""


def run(tmp_path: Path, program: str, num_workers: int = 2) -> int:
    command = [sys.executable, "-c", PROLOGUE + textwrap.dedent(program)]
    return launch(command, num_workers, tmp_path / "logs", name=lambda rank: f"rank {rank} (stage {rank})")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_all_workers_end_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = 'print("hello from", rank, os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"])'
    assert run(tmp_path, program) == 0
    printed = capfd.readouterr()
    assert printed.out == "hello from 0 2 1\n"
    assert printed.err == ""
    assert (tmp_path / "logs" / "rank1.log").read_text() == "hello from 1 2 1\n"


def test_killed_worker_is_named_though_the_others_hang(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), file=sys.stderr, flush=True)
    time.sleep(1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    """
    start = time.monotonic()
    assert run(tmp_path, program, num_workers=3) == 1
    assert time.monotonic() - start < 20
    (line,) = capfd.readouterr().err.splitlines()
    assert "rank 1 (stage 1) was killed by signal 9 (SIGKILL)" in line
    assert "rank1.log" in line
    for rank in range(3):
        pid = int((tmp_path / "logs" / f"rank{rank}.log").read_text().split()[0])
        assert not alive(pid)


def test_kill_comes_before_the_errors_that_it_causes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = """
    def work():
        time.sleep(0.3 if rank == 1 else 0.8)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("connection closed by peer")
    sys.exit(run_reported(work, rank))
    """
    assert run(tmp_path, program) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "rank 1 (stage 1) was killed by signal 9" in line
    assert "connection closed by peer" in (tmp_path / "logs" / "rank0.log").read_text()


def test_users_error_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = """
    def work():
        if rank == 0:
            raise ValueError("data.files names\\n nothing")
        raise StoppedElsewhereError
    sys.exit(run_reported(work, rank))
    """
    assert run(tmp_path, program) == 2
    assert capfd.readouterr().err == "infinipipe: error: data.files names nothing\n"
    assert "Traceback" in (tmp_path / "logs" / "rank0.log").read_text()


def test_crash_names_worker_error_and_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = """
    def work():
        if rank == 1:
            raise RuntimeError("boom")
        time.sleep(600)
    sys.exit(run_reported(work, rank))
    """
    assert run(tmp_path, program) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "rank 1 (stage 1) failed: RuntimeError: boom; see" in line


def test_reports_of_an_earlier_run_are_forgotten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "error0.json").write_text('{"message": "old", "is_users": true, "time": 1.0}')
    assert run(tmp_path, "os._exit(7)", num_workers=1) == 1
    assert "ended with exit code 7 without a word" in capfd.readouterr().err


def test_without_a_launcher_a_users_error_goes_to_standard_error() -> None:
    program = PROLOGUE + 'def work(): raise ValueError("no such thing")\nsys.exit(run_reported(work, rank))'
    environment = {k: v for k, v in os.environ.items() if k != "INFINIPIPE_REPORTS"} | {"RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (2, "infinipipe: error: no such thing\n")


LAUNCHER = """
import sys
from pathlib import Path
from infinipipe.train.launch import launch
worker = '''
import os, sys, time
from infinipipe.train.errors import run_reported
def work():
    print(os.getpid(), file=sys.stderr, flush=True)
    time.sleep(600)
sys.exit(run_reported(work, int(os.environ["RANK"])))
'''
sys.exit(launch([sys.executable, "-c", worker], 2, Path(sys.argv[1]), name=str))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_launcher(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], stderr=subprocess.PIPE, text=True
    ) as process:
        logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
        deadline = time.monotonic() + 30
        while not all(log.exists() and log.read_text().endswith("\n") for log in logs):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert err == "infinipipe: interrupted; the workers were stopped\n"
    deadline = time.monotonic() + 10
    for log in logs:
        while alive(int(log.read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_first_request_goes_to_the_workers_and_the_second_ends_the_wait() -> None:
    with subprocess.Popen(["sleep", "600"]) as worker, _Interruption([worker]) as interruption:
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.asked
        assert worker.wait(timeout=20) == -signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_order_of_causes() -> None:
    early, late = ErrorReport("a", False, 1.0), ErrorReport("b", False, 2.0)
    user = ErrorReport("c", True, 3.0)
    assert root_cause([Failure(0, 1, late), Failure(1, 1, early)]).rank == 1
    assert root_cause([Failure(0, 1, early), Failure(1, 2, user)]).rank == 1
    assert root_cause([Failure(0, 2, user), Failure(1, -9, None)]).rank == 1
    assert root_cause([Failure(0, 1, None), Failure(1, 1, late)]).rank == 1
