"""``infinipipe export RUN OUTPUT``: a checkpoint of a run as a Hugging Face model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinipipe.cli.options import parse_options


@dataclass(frozen=True)
class ExportOptions:
    """What to export.

    Attributes:
        run: the output folder of a training run, of which the newest valid checkpoint is taken, or one of its checkpoints.
        output: the folder to write, which must not exist yet.
    """

    run: str
    output: str


def run(arguments: Sequence[str]) -> int:
    """Export; a training run that still goes on is not disturbed."""
    options = parse_options(ExportOptions, "export", "Write a checkpoint as a Hugging Face model.", arguments)
    from infinipipe.train.convert import export, find_checkpoint

    checkpoint = find_checkpoint(Path(options.run))
    export(checkpoint, Path(options.output))
    print(f"wrote {options.output} from {checkpoint}")
    return 0
