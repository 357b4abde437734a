"""Folders and files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infinipipe.files import WriteError


@contextmanager
def written_folder(folder: Path) -> Iterator[Path]:
    """A fresh folder beside ``folder``, renamed to it at the end; left out if the body raises.

    If another process has written ``folder`` meanwhile, that one stays. Raises ``WriteError`` if the folder or what the body
    puts into it cannot be written.
    """
    beside = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        yield beside
        try:
            beside.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    except OSError as error:
        raise WriteError(f"cannot write the folder {str(folder)!r}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
