"""Work in order on several processes that start afresh and import no torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from types import TracebackType
from typing import Any, Generic, TypeVar

from infinipipe.data.documents import DataError

Given = TypeVar("Given")
Made = TypeVar("Made")
Tool = TypeVar("Tool")

AHEAD = 2
"""Pieces of work that wait for each worker beside the one it does."""

_tool: object = None
"""What the work of this process is done with."""


class Workers(Generic[Given, Made]):
    """Does work on ``processes`` of them, or in this one if they are none. A context manager.

    Args:
        make: makes, once in every process, what does the work: a function from a piece of work to its result.
        argument: of ``make``.
    """

    def __init__(self, processes: int, make: Callable[[Tool], Callable[[Given], Made]], argument: Tool) -> None:
        self._processes = processes
        self._work: Callable[[Given], Made] | None = None
        self._pool: ProcessPoolExecutor | None = None
        if processes == 0:
            self._work = make(argument)
        else:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(processes, context, _start, (make, argument))

    def map(self, pieces: Iterable[Given]) -> Iterator[Made]:
        """The results of all pieces, in their order. Raises what the first piece to fail has raised."""
        if self._work is not None:
            yield from map(self._work, pieces)
            return
        assert self._pool is not None
        waiting: deque[Future[Made]] = deque()
        try:
            for piece in pieces:
                waiting.append(self._pool.submit(_do, piece))
                if len(waiting) > self._processes * (1 + AHEAD):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenExecutor:
            raise DataError(
                f"a process that tokenizes has died, perhaps for want of memory; lower data.workers from {self._processes}, or set it "
                "to 1, which starts none"
            ) from None
        finally:
            for future in waiting:
                future.cancel()

    def __enter__(self) -> Workers[Given, Made]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; work that has not begun is left undone."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(make: Callable[[Tool], object], argument: Tool) -> None:
    """Prepare a worker: it leaves Ctrl-C to the process that started it, and ends when that one does."""
    global _tool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tool = make(argument)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(piece: object) -> Any:
    assert callable(_tool)
    return _tool(piece)
