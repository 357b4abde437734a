"""What the parser of options and configuration files says, in the user's words."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterator
from typing import get_args, get_type_hints


def in_words(message: str, known: Collection[str], *, options: bool = False) -> str:
    """The parser's message as one sentence without Python's spellings, with the nearest of the ``known`` names for one that is not.

    ``options`` says that names are those of options, such as ``--output``, not of settings.
    """
    kind, dashes = ("option", "--") if options else ("setting", "")
    message = re.sub(r"<class '(\w+)'>", r"\1", " ".join(message.split())).replace("typing.", "")
    message = re.sub(r'Parser key "([\w.]+)":', rf"{dashes}\1:", message)
    message = re.sub(r"Does not validate .* Subtypes: \[(.*)\] Errors: .* Given value: (.*)", _one_of, message)
    message = re.sub(r"Expected a Literal\[(.*?)\]", r"Expected one of \1", message)
    message = re.sub(r"Problem with given class_path '[\w.]+': (.*)", r"in one of them, \1", message)
    message = re.sub(r"Group '(\w+)' does not accept option '([\w.]+)'", r"there is no setting \1.\2", message)
    message = re.sub(r"Option '([\w.]+)' is not accepted", r"there is no setting \1", message)
    message = re.sub(r"unrecognized arguments: --([\w.-]+).*", rf"there is no {kind} {dashes}\1", message)
    message = message.replace("Problems parsing config:", "the configuration file is malformed:")
    return re.sub(
        rf"there is no {kind} (--)?([\w.-]+)", lambda match: f"{match[0]}{nearest(match[2], known, dashes)}", message
    )


def nearest(name: str, known: Collection[str], dashes: str = "") -> str:
    """What to say of the known name that ``name`` may have been meant for; nothing if none is near."""
    same = [other for other in known if "." in name and other.rpartition(".")[2] == name.rpartition(".")[2]]
    found = difflib.get_close_matches(name, same or known, n=1, cutoff=0.0 if same else 0.6)
    return f"; the nearest is {dashes}{found[0]}" if found else ""


def setting_names(kind: type, prefix: str = "") -> Iterator[str]:
    """The names of all settings of a dataclass, those of nested ones with dots; of tables by name only their fields'."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        yield prefix + field.name
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from setting_names(hint, f"{prefix}{field.name}.")
        for part in get_args(hint):
            if isinstance(part, type) and dataclasses.is_dataclass(part):
                yield from setting_names(part)


def _one_of(match: re.Match[str]) -> str:
    """The kinds of values among which a given one is not."""
    kinds = [kind for kind in re.split(r", (?![^\[]*\])", match[1]) if kind != "NoneType"]
    return f"Expected a {' or '.join(kinds)}. Got value: {match[2]}"
