"""What rank 0 says on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from infinipipe.data.corpus import Progress as Report


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
        """A function that shows how far a long reading is: a bar on a terminal, one line for each start elsewhere."""
        seen: dict[str, TaskID] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        console = RichConsole(file=sys.stdout)
        disable = self._quiet or not console.is_terminal
        with Progress(*columns, console=console, disable=disable, transient=True) as bars:

            def report(what: str, done: int, total: int) -> None:
                if what not in seen:
                    seen[what] = bars.add_task(what, total=total)
                    if not console.is_terminal:
                        self.say(f"{what}: {total / 1e6:.1f} MB")
                bars.update(seen[what], completed=done)

            yield report
