"""The pool of worker processes."""

from __future__ import annotations

import os
import signal

from infinipipe.verify import WorkerPool


def _interrupted(rank: int) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return rank


def test_an_interrupt_is_left_to_the_caller() -> None:
    with WorkerPool(2) as pool:
        assert pool.run(_interrupted) == [0, 1]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
