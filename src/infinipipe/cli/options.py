"""Options of a command, declared as a dataclass whose required fields are the positional arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from jsonargparse import ArgumentParser

from infinipipe.settings import SettingError

Options = TypeVar("Options")


def parse_options(kind: type[Options], command: str, description: str, arguments: Sequence[str]) -> Options:
    """The options in ``arguments``. Raises ``SettingError`` in the user's words."""
    parser = ArgumentParser(prog=f"infinipipe {command}", description=description, exit_on_error=False)
    parser.add_class_arguments(kind, "options", as_group=False, as_positional=True)
    names = {"--options.": "--", "options.": ""}
    try:
        parsed: Any = parser.parse_args(list(arguments))
        return parser.instantiate_classes(parsed).options
    except argparse.ArgumentError as error:
        message = " ".join(str(error).split())
        for inner, outer in names.items():
            message = message.replace(inner, outer)
        raise SettingError(f"{re.sub(r'^Parser key ', '', message)}; see 'infinipipe {command} --help'") from None
