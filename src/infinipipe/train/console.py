"""What rank 0 says on the terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from infinipipe.data import Progress as Reached
from infinipipe.data.progress import Report

LINE_SECONDS = 30.0
"""Between the lines that tell how far a long reading is, where there is no terminal."""


class Console:
    """Lines and progress bars on standard output; nothing at all if ``quiet``."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def say(self, text: str) -> None:
        """Print a line."""
        if not self._quiet:
            print(text, flush=True)

    @contextmanager
    def progress(self) -> Iterator[Report]:
        """A function that shows how far a long reading is: a bar on a terminal, a line every half minute elsewhere."""
        seen: dict[str, TaskID] = {}
        said: dict[str, float] = {}
        documents = TextColumn("{task.fields[documents]:,} documents")
        columns = (TextColumn("{task.description}"), BarColumn(), documents, DownloadColumn(), TimeRemainingColumn())
        console = RichConsole(file=sys.stdout)
        disable = self._quiet or not console.is_terminal
        with Progress(*columns, console=console, disable=disable, transient=True) as bars:

            def report(reached: Reached) -> None:
                what = reached.what
                if what not in seen:
                    seen[what] = bars.add_task(what, total=reached.bytes_total or None, documents=0)
                bars.update(seen[what], completed=reached.bytes_done, documents=reached.documents)
                if not console.is_terminal and time.monotonic() - said.get(what, -math.inf) >= LINE_SECONDS:
                    said[what] = time.monotonic()
                    self.say(str(reached))

            yield report
