"""A signal that asks a run to stop: the step is finished and saved first."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

STOPPED = 3
"""Exit code of a run that was asked to stop, and can be resumed."""


class StopRequest:
    """As a context manager it notes SIGTERM and SIGINT in ``asked`` instead of dying of them; in the main thread."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def note(self) -> None:
        """What is done at every signal."""
        self.asked = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.note()

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
