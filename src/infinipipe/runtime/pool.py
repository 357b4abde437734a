"""A pool of worker processes with one process group, reused over many cases: starting them costs more than a case."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from infinipipe.runtime.mesh import Layout, Mesh


class WorkerError(RuntimeError):
    """A worker raised or died; the message has its traceback."""


def _serve(rank: int, size: int, store: str, backend: str, timeout: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            reply: tuple[bool, Any] = (True, function(rank, *args))
        except Exception:
            reply = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(reply))


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the end, and is nothing to the processes that are started within."""
    held: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: held.append(number)) if main else None
    resource_tracker.ensure_running()  # or the fork server would start it, and it unblocks the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if main:
            signal.signal(signal.SIGINT, handler)
    if held:
        raise KeyboardInterrupt


class WorkerPool:
    """``size`` processes of one thread each, joined in one process group.

    ``backend`` is that of the process group. A message or collective may take ``timeout`` seconds before the job fails. Use
    it as a context manager. After a failed job the pool is broken and must be closed. Ctrl-C interrupts the caller alone.
    """

    def __init__(self, size: int, *, backend: str = "gloo", timeout: float = 60.0) -> None:
        self.size = size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["infinipipe.runtime"])
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        try:
            with _interrupts_held():
                for rank in range(size):
                    ours, theirs = context.Pipe()
                    process = context.Process(
                        target=_serve, args=(rank, size, store, backend, timeout, theirs), daemon=True
                    )
                    process.start()
                    theirs.close()
                    self._pipes.append(ours)
                    self._processes.append(process)
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Call ``function(rank, *args)`` on ``ranks`` (all by default) at once; results in their order.

        Raises ``WorkerError`` as soon as one raises or dies.
        """
        chosen = list(range(self.size)) if ranks is None else list(ranks)
        for rank in chosen:
            self._pipes[rank].send_bytes(pickle.dumps((function, args)))
        results: dict[int, Any] = {}
        pending = {self._pipes[rank]: rank for rank in chosen}
        while pending:
            for pipe in wait(list(pending)):
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    raise WorkerError(f"worker {rank} died") from None
                if not good:
                    raise WorkerError(f"worker {rank} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in chosen]

    def close(self) -> None:
        """End all workers."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@lru_cache(maxsize=32)
def get_mesh(layout: Layout, device_type: str = "cpu") -> Mesh:
    """The mesh of a layout, made once for a worker's life; the first call is a collective of all workers."""
    return Mesh(layout, device_type)
