"""Documents from globbed text and JSONL files, with a stated policy for everything that can be wrong with them."""

from __future__ import annotations

import glob
import json
import os
import string
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from infinipipe.data.settings import DataSettings


class DataError(ValueError):
    """A corpus that cannot be read as the settings ask; the message names the file and what to change."""


@dataclass(frozen=True, slots=True)
class Document:
    """One training example.

    ``text`` is learnt, ``prompt`` before it is only read. ``name`` is the file, with the line number in a JSONL file.
    """

    name: str
    text: str
    prompt: str = ""


@dataclass
class ReadCounts:
    """What reading a corpus met."""

    files: int = 0
    documents: int = 0
    empty: int = 0
    undecodable: int = 0
    bad_records: int = 0

    def describe(self, settings: DataSettings) -> str:
        """One sentence for the log."""
        did = {"drop": "dropped", "replace": "repaired", "error": "refused"}
        text = f"{self.documents} documents in {self.files} files"
        for count, what in (
            (self.empty, "empty, skipped"),
            (self.undecodable, f"not UTF-8, {did[settings.on_undecodable]}"),
            (self.bad_records, f"malformed JSONL lines, {did[settings.on_bad_record]}"),
        ):
            if count:
                text += f"; {count} {what}"
        return text

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def expand(pattern: str) -> str:
    """Expand ``{stdlib}``, ``~`` and environment variables. Raises ``DataError`` for an unknown ``{name}`` or ``$NAME``."""
    pattern = pattern.replace("{stdlib}", glob.escape(sysconfig.get_paths()["stdlib"]))
    try:
        return os.path.expanduser(string.Template(pattern).substitute(os.environ))
    except KeyError as error:
        raise DataError(f"data.files uses ${error.args[0]}, but the environment has no such variable") from None
    except ValueError:
        raise DataError(f"data.files has a $ that names no variable in {pattern!r}; write $$ for a plain $") from None


def find_files(settings: DataSettings) -> list[Path]:
    """The files that ``settings`` name, sorted, each once, by its shortest name.

    Raises ``DataError`` for a glob that matches nothing and for a symbolic link by which a ``**`` leads back to where it lies.
    """
    found: dict[str, str] = {}
    for pattern in settings.files:
        expanded = expand(pattern)
        matches = _matches(expanded)
        kept = [path for path in matches if not any(fnmatch(path, excluded) for excluded in settings.exclude)]
        if not kept:
            if matches:
                problem = f"all its {len(matches)} files are excluded by data.exclude"
            elif glob.has_magic(expanded):
                problem = f"no file matches (working folder {os.getcwd()})"
            elif os.path.isdir(expanded):
                problem = f"it is a folder; write {pattern.rstrip('/')}/**/* for the files in it"
            else:
                problem = f"there is no such file (working folder {os.getcwd()})"
            raise DataError(f"data.files names {pattern!r}, but {problem}")
        for path in kept:
            real = os.path.realpath(path)
            found[real] = min(found.get(real, path), path, key=lambda name: (len(name), name))
    return [Path(path) for path in sorted(found.values())]


def _matches(pattern: str) -> list[str]:
    """The files that a pattern matches. Raises ``DataError`` at a cycle of symbolic links, which ``**`` would follow for ever."""
    reached: dict[str, frozenset[str]] = {}

    def real_parents(folder: str) -> frozenset[str]:
        if folder not in reached:
            parent = os.path.dirname(folder)
            above = real_parents(parent) if parent != folder else frozenset()
            real = os.path.realpath(folder)
            if real in above and os.path.islink(folder):
                raise DataError(
                    f"data.files names {pattern!r}, which follows the symbolic link {folder} back to {real}; remove the link "
                    "or name the files without it"
                )
            reached[folder] = above | {real}
        return reached[folder]

    parts = pattern.split(os.sep)
    for index, part in enumerate(parts):
        if part == "**":
            for folder in glob.iglob(os.sep.join(parts[: index + 1]) + os.sep, recursive=True):
                real_parents(os.path.dirname(folder))
    return [path for path in glob.iglob(pattern, recursive=True) if os.path.isfile(path)]


def read_documents(
    files: list[Path], settings: DataSettings, counts: ReadCounts, progress: Callable[[int], None] | None = None
) -> Iterator[Document]:
    """Read ``files`` in order; what was met is added to ``counts``, and ``progress`` gets the bytes read so far.

    Empty documents are counted and skipped. Raises ``DataError`` for a file that cannot be opened, and for undecodable
    bytes or malformed records where the settings say ``error``.
    """
    bytes_read = 0
    for path in files:
        counts.files += 1
        is_jsonl = settings.format == "jsonl" or (
            settings.format == "auto" and path.suffix.lower() in (".jsonl", ".ndjson")
        )
        try:
            with path.open("rb") as file:
                if is_jsonl:
                    for number, line in enumerate(file, start=1):
                        bytes_read += len(line)
                        if line.strip():
                            yield from _kept(_record(line, f"{path}:{number}", settings, counts), counts)
                        if progress is not None:
                            progress(bytes_read)
                else:
                    content = file.read()
                    bytes_read += len(content)
                    text = _decode(content, str(path), settings, counts)
                    yield from _kept(None if text is None else Document(str(path), text), counts)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        if progress is not None:
            progress(bytes_read)


def _kept(document: Document | None, counts: ReadCounts) -> Iterator[Document]:
    if document is None:
        return
    if not document.text:
        counts.empty += 1
        return
    counts.documents += 1
    yield document


def _decode(content: bytes, name: str, settings: DataSettings, counts: ReadCounts) -> str | None:
    """The text without a byte-order mark, or ``None`` if it is dropped."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if settings.on_undecodable == "error":
            raise DataError(
                f"{name} is not UTF-8 at byte {error.start}; set data.on_undecodable to drop or replace to go on, "
                "or leave the file out with data.exclude"
            ) from None
    counts.undecodable += 1
    if settings.on_undecodable == "drop":
        return None
    return content.decode("utf-8", errors="replace").removeprefix("\ufeff")


def _record(line: bytes, name: str, settings: DataSettings, counts: ReadCounts) -> Document | None:
    text = _decode(line, name, settings, counts)
    if text is None:
        return None
    try:
        return _to_document(json.loads(text), name, settings)
    except ValueError as error:
        problem = f"is not JSON ({error.msg})" if isinstance(error, json.JSONDecodeError) else str(error)
    except RecursionError:
        problem = "is nested too deeply"
    if settings.on_bad_record == "error":
        raise DataError(f"{name}: the line {problem}; set data.on_bad_record to drop to skip such lines")
    counts.bad_records += 1
    return None


def _to_document(record: Any, name: str, settings: DataSettings) -> Document:
    if not isinstance(record, dict):
        raise ValueError("is not a JSON object")
    if settings.text_field in record:
        return Document(name, _text(record, settings.text_field))
    if settings.prompt_field in record and settings.completion_field in record:
        return Document(name, _text(record, settings.completion_field), _text(record, settings.prompt_field))
    raise ValueError(
        f"has neither the field {settings.text_field!r} (data.text_field) nor both {settings.prompt_field!r} and "
        f"{settings.completion_field!r} (data.prompt_field, data.completion_field)"
    )


def _text(record: dict[str, Any], field: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        raise ValueError(f"has a field {field!r} that is not a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"has a field {field!r} with an unpaired surrogate") from None
    return value
