"""Hugging Face configurations on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infinipipe.runtime.footprint import Footprint


def read_footprint(path: Path, dtype: str | None) -> Footprint:
    """What planning needs to know of the model whose configuration is at ``path``, computing in ``dtype``, bfloat16 if not given.

    Raises ``ValueError`` for one that cannot be read or trained.
    """
    # The model is built, without storage, which takes PyTorch; presets and cost files do not need it.
    import torch

    from infinipipe.model import check_supported, load_config
    from infinipipe.runtime.footprint import footprint

    config = load_config(path)
    check_supported(config)
    return footprint(config, getattr(torch, dtype or "bfloat16"))
