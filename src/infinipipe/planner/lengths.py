"""Sequence lengths from files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from infinipipe.plan import PlanError


def read_lengths(path: str | Path) -> list[int]:
    """Lengths in tokens: one a line, a JSON list, a NumPy array, or the folder of a tokenized corpus.

    Raises ``PlanError`` naming the file and, where there is one, the line.
    """
    path = Path(path)
    try:
        if path.is_dir():
            lengths = np.diff(np.load(path / "ends.npy"), prepend=0).tolist()
        elif path.suffix == ".npy":
            lengths = np.load(path).ravel().tolist()
        elif path.suffix == ".json":
            lengths = json.loads(path.read_text())
        else:
            lengths = [
                _integer(line, path, number) for number, line in enumerate(path.read_text().split("\n"), 1) if line
            ]
    except OSError as error:
        raise PlanError(f"cannot read lengths from {path}: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise PlanError(f"{path} is not JSON: {error}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not a text file") from None
    if not isinstance(lengths, list) or not all(type(length) is int for length in lengths):
        raise PlanError(f"{path} must hold whole numbers, one for each sequence")
    if not lengths or min(lengths) < 1:
        raise PlanError(f"{path} must hold at least one length, each at least 1")
    return lengths


def _integer(line: str, path: Path, number: int) -> int:
    try:
        return int(line)
    except ValueError:
        raise PlanError(f"{path}, line {number}: {line.strip()!r} is not a whole number") from None
