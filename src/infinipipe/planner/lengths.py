"""Sequence lengths from files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from infinipipe.files import parse_json
from infinipipe.plan import PlanError


def read_lengths(path: str | Path) -> list[int]:
    """Lengths in tokens: one a line, a JSON list, a NumPy array, or the folder of a tokenized corpus.

    Raises ``PlanError`` naming the file and, where there is one, the line.
    """
    path = Path(path)
    try:
        if path.is_dir():
            lengths = np.diff(_array(path / "index.npz", "ends"), prepend=0).tolist()
        elif path.suffix == ".npy":
            lengths = _array(path).ravel().tolist()
        elif path.suffix == ".json":
            lengths = parse_json(path.read_text(encoding="utf-8-sig"))
        else:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
            lengths = [_integer(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    except OSError as error:
        raise PlanError(f"cannot read lengths from {error.filename or path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not a text file") from None
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(f"{path} is not JSON: {error}") from None
    if not isinstance(lengths, list) or not all(type(length) is int for length in lengths):
        raise PlanError(f"{path} must hold whole numbers, one for each sequence")
    if not lengths or min(lengths) < 1:
        raise PlanError(f"{path} must hold at least one length, each at least 1")
    return lengths


def _array(path: Path, member: str | None = None) -> np.ndarray[Any, Any]:
    """The array of a .npy file, or ``member`` of a .npz file. Raises ``PlanError`` and ``OSError``."""
    try:
        loaded = np.load(path)
        array = loaded if member is None else loaded[member]
    except (ValueError, EOFError, KeyError, IndexError, zipfile.BadZipFile):
        array = None
    if not isinstance(array, np.ndarray):
        raise PlanError(f"{path} is not a NumPy file of numbers")
    return array


def _integer(line: str, path: Path, number: int) -> int:
    try:
        return int(line)
    except ValueError:
        raise PlanError(f"{path}, line {number}: {line.strip()[:40]!r} is not a whole number") from None
