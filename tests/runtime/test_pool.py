"""The pool of worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import forkserver

import pytest

from infinipipe.runtime.pool import WorkerPool


def _interrupted(rank: int) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return rank


def test_an_interrupt_is_left_to_the_caller() -> None:
    with WorkerPool(2) as pool:
        assert pool.run(_interrupted) == [0, 1]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_an_interrupt_while_workers_are_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, before = forkserver.connect_to_new_process, multiprocessing.active_children()

    def interrupted(fds: list[int]) -> tuple[int, int]:
        os.kill(os.getpid(), signal.SIGINT)
        return connect(fds)

    monkeypatch.setattr(forkserver, "connect_to_new_process", interrupted)
    with pytest.raises(KeyboardInterrupt):
        WorkerPool(2)
    assert multiprocessing.active_children() == before
