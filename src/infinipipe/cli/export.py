"""``infinipipe export RUN OUTPUT``: a checkpoint of a run as a Hugging Face model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infinipipe.cli.options import parse_options


@dataclass(frozen=True)
class ExportOptions:
    """What to export.

    Attributes:
        run: the output folder of a training run, of which the newest valid checkpoint is taken, or one of its checkpoints.
        output: the folder to write, which must not exist yet.
        dtype: what to write the weights in; source is what the run would write at its end, by its train.export_dtype.
    """

    run: str
    output: str
    dtype: Literal["source", "float32", "bfloat16", "float16"] = "source"


def run(arguments: Sequence[str]) -> int:
    """Export; a training run that still goes on is not disturbed."""
    options = parse_options(ExportOptions, "export", "Write a checkpoint as a Hugging Face model.", arguments)
    from infinipipe.train.convert import export, find_checkpoint

    checkpoint = find_checkpoint(Path(options.run))
    export(checkpoint, Path(options.output), dtype="" if options.dtype == "source" else options.dtype)
    print(f"wrote {options.output} from {checkpoint}")
    return 0
