"""Files that appear whole or not at all, and JSON from anywhere. Imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class WriteError(ValueError):
    """A file that cannot be written; the message names it and says why."""


def write_beside(path: str | Path, content: bytes) -> None:
    """Write a file beside ``path``, then rename it. Raises ``WriteError`` if that cannot be done."""
    path = Path(path)
    beside = path.parent / f"{path.name}.tmp{os.getpid()}"
    try:
        try:
            beside.write_bytes(content)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"cannot write {str(path)!r}: {error.strerror}") from None


def parse_json(text: str) -> Any:
    """The value that ``text`` spells. Raises ``ValueError``, also for nesting too deep to read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
