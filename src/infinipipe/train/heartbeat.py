"""Heartbeats: what every process of a job is doing; and the watchdog that ends a job in which none gets on. Imports no torch.

Every process keeps a small file that all others can read: its current action, since when, and when it was last alive. A thread
in every process looks at all files; when no process has begun a new action for too long, it names the one that hangs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infinipipe.train.errors import REPORTS, ErrorReport, write_report

_SIZE = 512
WAITING = "waiting"
"""Actions that begin with this word are not the cause of a hang."""
Announce = Callable[[str], None]
"""``announce(action)``: what this process does from now on, in words."""


def announce_nothing(action: str) -> None:
    """For a process that nobody watches."""


@dataclass(frozen=True)
class State:
    """What a process said last: its action, when that began, and when it last showed that it lives (seconds since 1970)."""

    action: str
    since: float
    alive: float


def state_path(folder: Path, rank: int) -> Path:
    return folder / f"state{rank}.json"


def read_state(folder: Path, rank: int) -> State | None:
    """The state of a process; ``None`` if it has not started, or writes just now."""
    try:
        return State(**json.loads(state_path(folder, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None


class Heartbeat:
    """This process's state in its file. Beats from :class:`Watchdog` keep it alive."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rank = folder, rank
        self._file = os.open(state_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._lock = threading.Lock()
        self._action, self._since = "starting", time.time()
        self.beat()

    def doing(self, action: str) -> None:
        """Say what this process does from now on."""
        with self._lock:
            self._action, self._since = action, time.time()
            self._write()

    def beat(self) -> None:
        """Show that this process lives."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        text = json.dumps({"action": self._action[:200], "since": self._since, "alive": time.time()})
        os.pwrite(self._file, text.encode().ljust(_SIZE), 0)


@dataclass(frozen=True)
class Hang:
    """The process that holds up a job: what it is at, and whether it still answers."""

    rank: int
    message: str


def find_hang(states: list[State | None], timeout: float, now: float) -> Hang | None:
    """The process at fault if none of them has begun a new action within ``timeout`` seconds.

    That is one that does not answer any more, else the one that has been longest at something other than waiting.
    """
    known = [state for state in states if state is not None]
    if not known or now - max(state.since for state in known) < timeout:
        return None

    def order(rank: int) -> tuple[bool, bool, float]:
        state = states[rank]
        if state is None:
            return False, False, 0.0
        return now - state.alive < timeout / 2, state.action.startswith(WAITING), state.since

    rank = min(range(len(states)), key=order)
    state = states[rank]
    if state is None:
        return Hang(rank, f"has not started; no other process has got on for {timeout:g} s (train.timeout)")
    answers = "" if now - state.alive < timeout / 2 else "does not answer and "
    return Hang(
        rank, f"{answers}holds up all processes for {timeout:g} s (train.timeout); its last action: {state.action}"
    )


class Watchdog(threading.Thread):
    """Ends this process, with a report, when no process of the job gets on for ``timeout`` seconds."""

    def __init__(self, heartbeat: Heartbeat, world_size: int, timeout: float, name: Callable[[int], str]) -> None:
        super().__init__(daemon=True)
        self._heartbeat, self._world_size, self._timeout, self._name_of = heartbeat, world_size, timeout, name
        self._over = threading.Event()
        self.start()

    def stop(self) -> None:
        """The job is over."""
        self._over.set()

    def run(self) -> None:
        folder = self._heartbeat.folder
        while not self._over.wait(min(5.0, self._timeout / 8)):
            self._heartbeat.beat()
            states = [read_state(folder, rank) for rank in range(self._world_size)]
            hang = find_hang(states, self._timeout, time.time())
            if hang is not None:
                self._end(hang)

    def _end(self, hang: Hang) -> None:
        print(f"infinipipe: error: {self._name_of(hang.rank)} {hang.message}", file=sys.stderr, flush=True)
        if REPORTS in os.environ:
            report = ErrorReport(hang.message, is_users=False, time=time.time(), about=hang.rank)
            write_report(Path(os.environ[REPORTS]), self._heartbeat.rank, report)
        os._exit(1)
