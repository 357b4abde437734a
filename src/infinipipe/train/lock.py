"""One job at a time in an output folder. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from infinipipe.settings import SettingError


class OutputLock:
    """A lock on a folder, held by this process and by those that inherit its file descriptor, until the last of them ends.

    Raises ``SettingError`` if another job has it, or if the folder cannot be written.
    """

    def __init__(self, output: Path) -> None:
        path = output / "lock"
        try:
            output.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise SettingError(f"train.output {str(output)!r} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self.descriptor, 200, 0).decode(errors="replace").strip() or "another job"
            os.close(self.descriptor)
            raise SettingError(
                f"train.output {str(output)!r} is in use by {owner}; choose another folder or wait until that job has ended"
            ) from None
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Let other jobs have the folder, once those that inherited the lock have ended too."""
        os.close(self.descriptor)
