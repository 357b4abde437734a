"""Options of a command, declared as a dataclass whose fields without default are the positional arguments."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from jsonargparse import ArgumentParser

from infinipipe.plan.loading import is_reference
from infinipipe.settings import SettingError

Options = TypeVar("Options")

GIB = 2**30
MOST_GIB = 2**20
"""The largest memory budget that an option takes."""


def parse_options(kind: type[Options], command: str, description: str, arguments: Sequence[str]) -> Options:
    """The options in ``arguments``. Raises ``SettingError`` in the user's words."""
    parser = ArgumentParser(prog=f"infinipipe {command}", description=description, exit_on_error=False)
    parser.add_class_arguments(kind, as_group=False, as_positional=True)
    try:
        parsed = parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        raise SettingError(f"{_in_words(str(error))}; see 'infinipipe {command} --help'") from None
    return kind(**parsed.as_dict())


def require_output(output: str | None, inputs: Iterable[str | Path | None] = ()) -> None:
    """Raise ``SettingError`` if the file ``output`` cannot be written, or would replace one of those that a command reads.

    Of ``path/to/file.py:function`` that is the file.
    """
    if output is None:
        return
    path = Path(output)
    read = {str(path).rpartition(":")[0] if is_reference(str(path)) else path for path in inputs if path is not None}
    if path.resolve() in {Path(path).resolve() for path in read}:
        raise SettingError(f"output {output} is a file that is read; name another file")
    if path.is_dir():
        raise SettingError(f"output {output} is a folder; name a file")
    if not path.parent.is_dir():
        raise SettingError(f"there is no folder {str(path.parent)!r} for output {output}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise SettingError(f"the folder {str(path.parent)!r} of output {output} cannot be written to; name another")


def _in_words(message: str) -> str:
    """The parser's message as one sentence without Python's spellings."""
    message = re.sub(r"<class '(\w+)'>", r"\1", " ".join(message.split())).replace("typing.", "")
    message = re.sub(r'^Parser key "(\w+)":', r"--\1:", message)
    match = re.fullmatch(r"(.*)Does not validate .* Subtypes: \[(.*)\] Errors: .* Given value: (.*)", message)
    if match is not None:
        kinds = " or ".join(kind for kind in re.split(r", (?![^\[]*\])", match[2]) if kind != "NoneType")
        message = f"{match[1]}Expected a {kinds}. Got value: {match[3]}"
    return re.sub(r"a Literal\[(.*?)\]", r"one of \1", message)
