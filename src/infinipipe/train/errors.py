"""Error reports: how a worker says what it died of; and how it notices that its launcher is gone. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

REPORTS = "INFINIPIPE_REPORTS"
"""Environment variable by which a launcher names the folder for reports; absent under other launchers."""


class StoppedElsewhereError(Exception):
    """Another process has met a user's error and says so; this one only ends."""


@dataclass(frozen=True)
class ErrorReport:
    """The error that ended a worker: its message, whether the user can mend it, and when it was.

    ``about`` is the rank of another process whose fault it was.
    """

    message: str
    is_users: bool
    time: float
    about: int | None = None


def report_path(folder: Path, rank: int) -> Path:
    return folder / f"error{rank}.json"


def read_report(folder: Path, rank: int) -> ErrorReport | None:
    """What worker ``rank`` has reported, if anything readable."""
    try:
        return ErrorReport(**json.loads(report_path(folder, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_report(folder: Path, rank: int, report: ErrorReport) -> None:
    """Leave a report for the launcher."""
    path = report_path(folder, rank)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(asdict(report)))
    beside.replace(path)


def run_reported(work: Callable[[], int], rank: int) -> int:
    """Run ``work`` and return its exit code, or 2 for a user's error (``ValueError``), 1 for any other.

    The traceback goes to standard error if a launcher sends that to a log; else a user's error is one line there.
    """
    folder = os.environ.get(REPORTS)
    if folder is not None:
        threading.Thread(target=_end_with_launcher, daemon=True).start()
    try:
        return work()
    except StoppedElsewhereError:
        return 2
    except Exception as error:
        is_users = isinstance(error, ValueError)
        first = " ".join(str(error).split())
        message = first if is_users else f"{type(error).__name__}: {first}"
        if folder is None and is_users:
            print(f"infinipipe: error: {message}", file=sys.stderr)
        else:
            traceback.print_exc()
        if folder is not None:
            write_report(Path(folder), rank, ErrorReport(message, is_users, time.time()))
        return 2 if is_users else 1


def leave(code: int) -> NoReturn:
    """End this process after a failure without tearing down communicators in which others may be stuck: that can abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_launcher() -> None:
    """The launcher never writes to standard input, so its end means that the launcher is gone."""
    while os.read(0, 1024):
        pass
    os._exit(1)
