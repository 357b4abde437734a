"""A small corpus of text files and its settings."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infinipipe.data import DataSettings

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


@pytest.fixture
def corpus_settings(tmp_path: Path) -> Callable[..., DataSettings]:
    """Settings for 20 text files of 5 to 100 words under ``tmp_path``, cached there too."""
    for index in range(20):
        (tmp_path / f"doc{index:02}.txt").write_text(words(5 * (index + 1), index))

    def settings(**changes: Any) -> DataSettings:
        values: dict[str, Any] = {"files": [str(tmp_path / "*.txt")], "cache": str(tmp_path / "cache"), "held_out": 0.2}
        return DataSettings(**(values | changes))

    return settings
