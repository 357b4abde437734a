"""Options of a command, declared as a dataclass whose fields without default are the positional arguments."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from jsonargparse import ArgumentParser

from infinipipe.cli.words import in_words
from infinipipe.plan.loading import is_reference
from infinipipe.settings import SettingError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


def parse_options(kind: type[Options], command: str, description: str, arguments: Sequence[str]) -> Options:
    """The options in ``arguments``. Raises ``SettingError`` in the user's words."""
    parser = ArgumentParser(prog=f"infinipipe {command}", description=description, exit_on_error=False)
    parser.add_class_arguments(kind, as_group=False, as_positional=True)
    try:
        parsed = parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        names = [field.name for field in dataclasses.fields(kind)]
        raise SettingError(f"{in_words(str(error), names, options=True)}; see 'infinipipe {command} --help'") from None
    return kind(**parsed.as_dict())


def require_output(output: str | None, inputs: Iterable[str | Path | None] = ()) -> None:
    """Raise ``SettingError`` if the file ``output`` cannot be written, or would replace one of those that a command reads.

    Of ``path/to/file.py:function`` that is the file.
    """
    if output is None:
        return
    path = Path(output)
    if path.is_dir():
        raise SettingError(f"output {output} is a folder; name a file")
    read = {str(path).rpartition(":")[0] if is_reference(str(path)) else path for path in inputs if path is not None}
    if path.resolve() in {Path(path).resolve() for path in read}:
        raise SettingError(f"output {output} is a file that is read; name another file")
    if not path.parent.is_dir():
        raise SettingError(f"there is no folder {str(path.parent)!r} for output {output}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise SettingError(f"the folder {str(path.parent)!r} of output {output} cannot be written to; name another")
