"""Starts the workers of one machine, watches them, and ends them all when one dies. Imports no torch.

Worker processes run the same command with torchrun's variables set. Each holds its standard input open: when the launcher
is gone, however it ended, the pipe breaks and the worker ends itself (see :mod:`infinipipe.train.errors`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinipipe.train.errors import REPORTS, ErrorReport, read_report, report_path
from infinipipe.train.heartbeat import state_path
from infinipipe.train.interrupt import STOPPED, StopRequest

USERS_ERROR = 2
"""Exit code of a run that the user's settings or files have ended."""
GRACE_SECONDS = 3.0
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Failure:
    """How a worker ended that should not have.

    ``code`` is its exit code, below 0 for the signal that killed it; ``report`` is what it wrote itself.
    """

    rank: int
    code: int
    report: ErrorReport | None

    @property
    def is_users(self) -> bool:
        return self.report is not None and self.report.is_users

    @property
    def culprit(self) -> int:
        """The rank whose fault it was."""
        return self.rank if self.report is None or self.report.about is None else self.report.about

    def describe(self, name: str, log: Path) -> str:
        """One message for the terminal; ``name`` and ``log`` are the culprit's."""
        if self.report is not None:
            if self.report.about is not None:
                return f"{name} {self.report.message}; all workers were stopped; see {log}"
            return self.report.message if self.is_users else f"{name} failed: {self.report.message}; see {log}"
        if self.code < 0:
            text = f"{name} was killed by signal {-self.code} ({signal.Signals(-self.code).name})"
            if -self.code == signal.SIGKILL:
                text += ", perhaps because the machine ran out of memory"
        else:
            text = f"{name} ended with exit code {self.code} without a word"
        return f"{text}; all workers were stopped; see {log}"


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others followed from: a kill, else a user's error, else the first that was reported."""

    def order(failure: Failure) -> tuple[bool, bool, float]:
        when = failure.report.time if failure.report is not None else float("inf")
        return failure.code >= 0, not failure.is_users, when

    return min(failures, key=order)


def launch(
    command: Sequence[str],
    num_workers: int,
    logs: Path,
    *,
    name: Callable[[int], str],
    inherited: Sequence[int] = (),
) -> int:
    """Run ``command`` in ``num_workers`` processes until all are done; returns the exit code for the whole.

    Worker output goes to ``logs/rankN.log``, except standard output of rank 0, which stays on the terminal. If one fails, the
    others are stopped and one message on standard error says which (``name(rank)``) and how. Ctrl-C and SIGTERM ask the workers
    to stop, which a training run does after its step, with exit code ``STOPPED``; a second one stops them at once. ``inherited``
    are file descriptors that the workers get.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for rank in range(num_workers):
        report_path(logs, rank).unlink(missing_ok=True)
        state_path(logs, rank).unlink(missing_ok=True)
    port = _free_port()
    workers = [_start(command, rank, num_workers, port, logs, inherited) for rank in range(num_workers)]
    interruption = _Interruption(workers)
    try:
        with interruption:
            failures = _watch(workers, logs)
    except KeyboardInterrupt:
        failures = []
    finally:
        _stop(workers)
    if interruption.asked and all(worker.returncode == STOPPED for worker in workers):
        return STOPPED
    own_words = [failure for failure in failures if failure.report is not None]
    if interruption.asked and not own_words:
        print("infinipipe: interrupted; the workers were stopped", file=sys.stderr)
        return 130
    if not failures:
        return 0
    cause = root_cause(failures)
    message = cause.describe(name(cause.culprit), logs / f"rank{cause.culprit}.log")
    print(f"infinipipe: error: {message}", file=sys.stderr)
    return USERS_ERROR if cause.is_users else 1


class _Interruption(StopRequest):
    """Passes the first request on to the workers; the second raises ``KeyboardInterrupt``."""

    def __init__(self, workers: Sequence[subprocess.Popen[bytes]]) -> None:
        super().__init__()
        self._workers = workers

    def note(self) -> None:
        if self.asked:
            raise KeyboardInterrupt
        super().note()
        _ask_to_stop(self._workers)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _loopback() -> str:
    """The interface that all workers of one machine share, whatever its name resolution says."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _start(
    command: Sequence[str], rank: int, num_workers: int, port: int, logs: Path, inherited: Sequence[int]
) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        REPORTS: str(logs),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    with (logs / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=None if rank == 0 else log,
            stderr=log,
            start_new_session=True,
            pass_fds=inherited,
        )


def _watch(workers: Sequence[subprocess.Popen[bytes]], logs: Path) -> list[Failure]:
    """Wait until all are done or, after the first failure, for those that notice it within the time of grace."""
    deadline = float("inf")
    while time.monotonic() < deadline:
        codes = [worker.poll() for worker in workers]
        if None not in codes:
            break
        if deadline == float("inf") and any(code not in (None, 0, STOPPED) for code in codes):
            deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
    return [
        Failure(rank, worker.returncode, read_report(logs, rank))
        for rank, worker in enumerate(workers)
        if worker.poll() not in (None, 0, STOPPED)
    ]


def _ask_to_stop(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()


def _stop(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs: ask, wait, kill."""
    _ask_to_stop(workers)
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        try:
            worker.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        if worker.stdin is not None:
            worker.stdin.close()
