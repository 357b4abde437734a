"""How far a long reading is, told again and again as long as it computes. Imports no torch."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

BEAT_SECONDS = 1.0
LEAST_SHARE = 0.05
"""Share of one CPU below which a reading is taken to stand still, and no more is told of it."""


@dataclass(frozen=True)
class Progress:
    """How far a long reading is.

    Attributes:
        what: is done.
        documents: read so far.
        bytes_done: of the files.
        bytes_total: of all files; 0 if that is not known.
        seconds: since it began.
    """

    what: str
    documents: int
    bytes_done: int
    bytes_total: int
    seconds: float

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far; ``None`` where nothing can be said yet."""
        if not self.bytes_done or not self.bytes_total:
            return None
        return max(0.0, self.seconds * (self.bytes_total / self.bytes_done - 1))

    def __str__(self) -> str:
        text = f"{self.what}: {self.documents:,} documents, {self.bytes_done / 1e6:,.1f}"
        text += f" of {self.bytes_total / 1e6:,.1f} MB" if self.bytes_total else " MB"
        left = self.seconds_left
        return text if left is None else f"{text}, {_readable(left)} left"


Report = Callable[[Progress], None]


def _readable(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Reading:
    """Tells ``report`` how far a reading is: at every step forward, and each second while this process or its children compute.

    A single long document so never looks like a hang, whereas a file system that does not answer does. Used as a context
    manager; ``report`` is called from a thread of its own, too, but never twice at once.
    """

    def __init__(self, what: str, bytes_total: int, report: Report | None) -> None:
        self._what, self._total, self._report = what, bytes_total, report
        self._documents = self._bytes = 0
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def step(self, documents: int, bytes_done: int) -> None:
        """So many more documents have been read, and so many bytes in all."""
        self._documents += documents
        self._bytes = min(bytes_done, self._total) if self._total else bytes_done
        self._tell()

    def _tell(self) -> None:
        if self._report is not None:
            with self._lock:
                seconds = time.monotonic() - self._start
                self._report(Progress(self._what, self._documents, self._bytes, self._total, seconds))

    def _beat(self) -> None:
        used = cpu_seconds()
        while not self._over.wait(BEAT_SECONDS):
            before, used = used, cpu_seconds()
            if used - before >= LEAST_SHARE * BEAT_SECONDS:
                self._tell()

    def __enter__(self) -> Reading:
        self._tell()
        if self._report is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()


def cpu_seconds() -> float:
    """What this process and its running children have computed."""
    return time.process_time() + sum(_of_child(child.pid) for child in multiprocessing.active_children())


def _of_child(pid: int | None) -> float:
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0
