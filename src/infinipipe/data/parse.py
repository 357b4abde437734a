"""From chunks of records to documents, by the policies for what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from infinipipe.data.documents import BadRecordError, DataError, Document, ReadCounts
from infinipipe.data.readers import what_it_is
from infinipipe.data.records import document_of, is_ambiguous
from infinipipe.data.settings import DataSettings
from infinipipe.data.shards import Chunk, Shard, read_chunks
from infinipipe.data.strict import load_json


def read_documents(
    shards: Sequence[Shard],
    settings: DataSettings,
    counts: ReadCounts,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Document]:
    """The documents of all shards in order; what was met is added to ``counts``.

    ``progress`` gets how many more documents have been read, and how many bytes so far. Empty documents are counted and skipped. Raises
    ``DataError`` for a file that cannot be opened, and for undecodable bytes or malformed records where the settings say ``error``.
    """
    counts.files += len(shards)
    for chunk in read_chunks(shards):
        documents = [document for _, document in documents_of(chunk, settings, counts)]
        yield from documents
        if progress is not None:
            progress(len(documents), chunk.bytes_done)


def documents_of(chunk: Chunk, settings: DataSettings, counts: ReadCounts) -> Iterator[tuple[int, Document]]:
    """The documents of a chunk, each with its index there; what was met is added to ``counts``. Raises as above."""
    for index, record in enumerate(_records(chunk, settings, counts)):
        document = _document(chunk, index, record, settings, counts)
        if document is None:
            continue
        if document.chat is None and document.tokens is None and not document.text:
            if document.prompt:
                counts.empty_completions += 1
            else:
                counts.empty += 1
        elif document.tokens is not None and not len(document.tokens):
            counts.empty += 1
        elif document.weight == 0:
            counts.unlearnt += 1
        else:
            counts.documents += 1
            yield index, document


def refuse(name: str, error: BadRecordError, settings: DataSettings, counts: ReadCounts) -> None:
    """Count a record that is no document, or raise ``DataError``, as the settings ask."""
    if settings.on_bad_record == "error":
        raise DataError(f"{name}: the record {error}; set data.on_bad_record to drop to skip such records")
    counts.bad_records += 1


def _records(chunk: Chunk, settings: DataSettings, counts: ReadCounts) -> Iterator[Any]:
    if chunk.kind != "table":
        yield from chunk.records
        return
    from pyarrow import ipc

    with ipc.open_stream(chunk.records) as reader:
        table = reader.read_all()
    try:
        yield from (_without_nulls(row) for row in table.to_pylist())
    except UnicodeDecodeError:
        for index in range(table.num_rows):
            yield _undecodable_row(table.slice(index, 1))


def _document(chunk: Chunk, index: int, record: Any, settings: DataSettings, counts: ReadCounts) -> Document | None:
    name = chunk.name(index)
    if chunk.kind in ("tokens", "text") and settings.weight_field:
        raise DataError(
            f"{name} holds no fields, so it cannot have a weight in {settings.weight_field!r}; empty data.weight_field, or leave "
            "it out with data.exclude"
        )
    if chunk.kind == "tokens":
        return Document(name, tokens=record)
    if chunk.kind == "text":
        text = _decode(record, name, settings, counts) if _is_text(record, name, settings, counts) else None
        return None if text is None else Document(name, text)
    try:
        if chunk.kind == "line":
            if not record.strip():
                return None
            if index == 0 and chunk.first == 1 and not _is_text(record, name, settings, counts):
                return None
            text = _decode(record, name, settings, counts)
            if text is None:
                return None
            record = _json(text)
        elif chunk.kind != "row":
            if chunk.kind == "csv":
                _require_all_fields(record)
            record = _repaired(record, name, settings, counts)
            if record is None:
                return None
        document = document_of(record, name, settings)
        counts.ambiguous += is_ambiguous(record, settings)
        return document
    except BadRecordError as error:
        refuse(name, error, settings, counts)
        return None


def _json(text: str) -> Any:
    try:
        return load_json(text)
    except json.JSONDecodeError as error:
        raise BadRecordError(f"is not JSON ({error.msg})") from None


def _decode(content: bytes, name: str, settings: DataSettings, counts: ReadCounts) -> str | None:
    """The text without a byte-order mark, or ``None`` if it is dropped."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        _undecodable(name, f"is not UTF-8 at byte {error.start}", settings, counts)
    return None if settings.on_undecodable == "drop" else content.decode("utf-8", "replace").removeprefix("\ufeff")


def _is_text(content: bytes, name: str, settings: DataSettings, counts: ReadCounts) -> bool:
    """Whether it is, or else is dropped: what is no text at all is never repaired. Raises ``DataError``."""
    known = what_it_is(content)
    if known and settings.on_undecodable != "drop":
        raise DataError(f"{name} is {known}; if it is not to be read, leave it out with data.exclude")
    counts.undecodable += bool(known)
    return not known


def _undecodable(name: str, problem: str, settings: DataSettings, counts: ReadCounts) -> None:
    if settings.on_undecodable == "error":
        raise DataError(
            f"{name} {problem}; set data.on_undecodable to drop or replace to go on, or leave it out with data.exclude"
        )
    counts.undecodable += 1


def _require_all_fields(row: dict[Any, Any]) -> None:
    """Raise ``BadRecordError`` for a row of CSV that is not as wide as the first one."""
    if None in row:
        raise BadRecordError("has more fields than the file has columns")
    if None in row.values():
        raise BadRecordError("has fewer fields than the file has columns")


def _repaired(record: Any, name: str, settings: DataSettings, counts: ReadCounts) -> Any:
    """A record without the surrogates that stand for undecodable bytes; ``None`` if it is dropped."""
    if _has_surrogates(record):
        _undecodable(name, "is not UTF-8", settings, counts)
        return None if settings.on_undecodable == "drop" else _replaced(record)
    return record


def _has_surrogates(value: Any) -> bool:
    if isinstance(value, str):
        return not value.isascii() and any("\udc80" <= character <= "\udcff" for character in value)
    if isinstance(value, dict):
        return any(_has_surrogates(key) or _has_surrogates(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(_has_surrogates, value))


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, dict):
        return {_replaced(key): _replaced(inner) for key, inner in value.items()}
    return [_replaced(inner) for inner in value] if isinstance(value, list) else value


def _without_nulls(value: Any) -> Any:
    """A value of a table without the fields that other rows have and this one lacks."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _undecodable_row(row: Any) -> dict[str, Any]:
    """A row of a table some of whose texts may not be UTF-8: their undecodable bytes as surrogates."""
    import pyarrow

    values = {}
    for field in row.column_names:
        column = row.column(field)
        if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
            content = column.cast(pyarrow.large_binary())[0].as_py()
            values[field] = None if content is None else content.decode("utf-8", "surrogateescape")
        else:
            try:
                values[field] = column[0].as_py()
            except UnicodeDecodeError:  # a text within lists and structures, which cannot be repaired in place
                values[field] = "\udc80"
    return _without_nulls(values)
