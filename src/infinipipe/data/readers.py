"""Files of every format as chunks of records: what a file is follows from its suffix, and is refused by its right name."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from infinipipe.data.documents import BadRecordError, DataError
from infinipipe.data.records import missing_fields, wanted_fields
from infinipipe.data.settings import DataSettings
from infinipipe.data.shards import CHUNK_BYTES, CHUNK_RECORDS, Chunk
from infinipipe.data.strict import load_json
from infinipipe.plan import PlanError
from infinipipe.plan.loading import load_function

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".idx": "megatron",
}
"""Format of a file by its suffix; all others are text."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".zstd")
ARROW_ROWS = 256
EXTRA = "pip install 'infinipipe[datasets]'"
MAGIC = (
    (b"\x1f\x8b", "compressed with gzip; let its name end in .gz"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd; let its name end in .zst"),
    (b"BZh", "compressed with bzip2; let its name end in .bz2"),
    (b"\xfd7zXZ\x00", "compressed with xz; let its name end in .xz"),
    (b"PAR1", "a Parquet file; let its name end in .parquet"),
    (b"ARROW1", "an Arrow file; let its name end in .arrow"),
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
    (b"Rar!\x1a\x07", "a rar archive; unpack it first"),
    (b"\x04\x22\x4d\x18", "compressed with lz4; unpack it first"),
    (b"%PDF-", "a PDF; take the text out of it first"),
    (b"\x89PNG\r\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"\x89HDF\r\n", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x7fELF", "a program"),
    (b"MMIDIDX\x00", "an index of Megatron; let its name end in .idx"),
    (b"\xff\xfe", "text in UTF-16; write it in UTF-8"),
    (b"\xfe\xff", "text in UTF-16; write it in UTF-8"),
)
"""What a file is by its first bytes, where that is no text."""
FIRST_BYTES = frozenset(magic[:1] for magic, _ in MAGIC)


@dataclass(frozen=True)
class FileShard:
    """A file that the settings name."""

    path: Path
    settings: DataSettings

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        with _readable(self.path):
            return self.path.stat().st_size

    def stamp(self) -> object:
        with _readable(self.path):
            paths = [self.path]
            if self.settings.reader:
                paths.append(Path(self.settings.reader.rpartition(":")[0]))
            if self.format == "megatron":
                paths.append(self.path.with_suffix(".bin"))
            return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]

    @property
    def format(self) -> str:
        """``own`` for a reader of the user's own, else the format that the settings give, or that its suffix tells."""
        if self.settings.reader:
            return "own"
        if self.settings.format != "auto":
            return self.settings.format
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        while suffixes and suffixes[-1] in COMPRESSIONS:
            suffixes.pop()
        return FORMATS.get(suffixes[-1], "text") if suffixes else "text"

    def chunks(self, skip: int) -> Iterator[Chunk]:
        readers: dict[str, Callable[[int], Iterator[Chunk]]] = {
            "text": self._text,
            "jsonl": self._lines,
            "json": self._json,
            "csv": lambda skip: self._csv(skip, ","),
            "tsv": lambda skip: self._csv(skip, "\t"),
            "parquet": self._parquet,
            "arrow": self._arrow,
            "megatron": self._megatron,
            "own": self._own,
        }
        with _readable(self.path):
            yield from readers[self.format](skip)

    def _own(self, skip: int) -> Iterator[Chunk]:
        yield from self._row_chunks("row", itertools.islice(self._own_records(), skip, None), skip)

    def _own_records(self) -> Iterator[Any]:
        """What the user's function yields, each like a record of a JSON file. Raises ``DataError`` for what it raises."""
        try:
            yield from load_function(self.settings.reader, "data reader")(self.path)
        except PlanError as error:
            raise DataError(f"{self.name} cannot be read: {error}") from None
        except Exception as error:
            what = " ".join(str(error).split())
            raise DataError(
                f"{self.name} cannot be read: the data reader {self.settings.reader} fails: {type(error).__name__}: {what}"
            ) from error

    def _text(self, skip: int) -> Iterator[Chunk]:
        if skip == 0:
            with _opened(self.path) as (file, _):
                yield Chunk("text", (self.name,), [file.read()], 1, bytes_done=self.size)

    def _lines(self, skip: int) -> Iterator[Chunk]:
        with _opened(self.path) as (file, raw):
            yield from self._line_chunks(file, skip, raw.tell)

    def _line_chunks(self, file: BinaryIO, skip: int, position: Callable[[], int]) -> Iterator[Chunk]:
        for _ in range(skip):
            file.readline()
        first = skip + 1
        while lines := file.readlines(CHUNK_BYTES):
            yield Chunk("line", (self.name,), lines, len(lines), first, bytes_done=position())
            first += len(lines)

    def _json(self, skip: int) -> Iterator[Chunk]:
        """An array of records, one record, or, as some have it, JSON lines under this suffix."""
        with _opened(self.path) as (file, _):
            content = file.read()
        self._require_text(content)
        is_utf8 = _is_utf8(content)
        text = content.decode("utf-8", "surrogateescape").removeprefix("\ufeff").lstrip()
        if not text:
            return
        try:
            value = load_json(text)
        except BadRecordError as error:
            raise DataError(f"{self.name} {error}; mend it, or leave it out with data.exclude") from None
        except json.JSONDecodeError as error:
            if text.startswith("{") and error.msg == "Extra data":
                yield from self._line_chunks(io.BytesIO(content), skip, lambda: self.size)
                return
            raise DataError(
                f"{self.name} is not JSON ({error.msg}, line {error.lineno}){'' if is_utf8 else ', nor UTF-8'}; mend it, leave it out "
                "with data.exclude, or take such files as plain text with data.format"
            ) from None
        rows = value if isinstance(value, list) else [value]
        yield from self._row_chunks("row" if is_utf8 else "escaped", rows[skip:], skip)

    def _csv(self, skip: int, delimiter: str) -> Iterator[Chunk]:
        csv.field_size_limit(sys.maxsize)
        with _opened(self.path) as (file, raw):
            buffered = io.BufferedReader(cast(io.RawIOBase, file))
            self._require_text(buffered.peek(16))
            text = io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="surrogateescape", newline="")
            rows = csv.DictReader(text, delimiter=delimiter, strict=True)
            try:
                require_fields(rows.fieldnames or (), self.name, self.settings)
                for _ in range(skip):
                    next(rows, None)
                yield from self._row_chunks("csv", rows, skip, raw.tell)
            except csv.Error as error:
                raise DataError(f"{self.name} is malformed at line {rows.line_num}: {error}") from None

    def _row_chunks(
        self, kind: Any, rows: Iterable[Any], skip: int, position: Callable[[], int] | None = None
    ) -> Iterator[Chunk]:
        group: list[Any] = []
        first, size = skip + 1, 0

        def chunk() -> Chunk:
            done = self.size if position is None else position()
            return Chunk(kind, (self.name,), group, len(group), first, bytes_done=done)

        for row in rows:
            group.append(row)
            size += sum(len(value) for value in row.values() if isinstance(value, str)) if isinstance(row, dict) else 1
            if size >= CHUNK_BYTES or len(group) == CHUNK_RECORDS:
                yield chunk()
                first, group, size = first + len(group), [], 0
        if group:
            yield chunk()

    def _parquet(self, skip: int) -> Iterator[Chunk]:
        self._require_unpacked()
        arrow = import_arrow(self.name)
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(self.path) as file:
                columns = require_fields(file.schema_arrow.names, self.name, self.settings)
                batches = file.iter_batches(ARROW_ROWS, columns=columns)
                yield from table_chunks(batches, self.name, skip, file.metadata.num_rows, self.size)
        except arrow.ArrowInvalid as error:
            raise _damaged(self.path, error) from None

    def _arrow(self, skip: int) -> Iterator[Chunk]:
        """A file of record batches, or a stream of them, as ``datasets`` keeps."""
        self._require_unpacked()
        arrow = import_arrow(self.name)
        from pyarrow import ipc

        try:
            with arrow.memory_map(str(self.path)) as source:
                try:
                    reader = ipc.open_file(source)
                    batches: Iterator[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
                except arrow.ArrowInvalid:
                    source.seek(0)
                    reader = ipc.open_stream(source)
                    batches = iter(reader)
                columns = require_fields(reader.schema.names, self.name, self.settings)
                chosen = (batch.select(columns) for batch in batches)
                yield from table_chunks(chosen, self.name, skip, 0, self.size)
        except arrow.ArrowInvalid as error:
            raise _damaged(self.path, error) from None

    def _require_text(self, content: bytes) -> None:
        if known := what_it_is(content):
            raise DataError(f"{self.name} is {known}; if it is not to be read, leave it out with data.exclude")

    def _require_unpacked(self) -> None:
        if self.path.suffix.lower() in COMPRESSIONS:
            raise DataError(f"{self.name} is a {self.format} file within a compressed one; unpack it first")

    def _megatron(self, skip: int) -> Iterator[Chunk]:
        from infinipipe.data.megatron import read_indexed

        indexed = read_indexed(self.path)
        group: list[Any] = []
        first, size = skip + 1, 0
        for number in range(skip, len(indexed)):
            group.append(indexed.tokens(number))
            size += group[-1].nbytes
            if size >= CHUNK_BYTES or len(group) == CHUNK_RECORDS or number == len(indexed) - 1:
                done = round(self.size * (number + 1) / len(indexed))
                yield Chunk("tokens", (self.name,), group, len(group), first, bytes_done=done)
                first, group, size = number + 2, [], 0


def table_chunks(batches: Iterable[Any], name: str, skip: int, rows: int, size: int) -> Iterator[Chunk]:
    """Chunks of the rows of Arrow record batches behind the first ``skip``; ``rows`` is their number, 0 if not known."""
    done = 0
    for batch in batches:
        start = max(0, skip - done)
        most = min(CHUNK_RECORDS, max(1, CHUNK_BYTES * batch.num_rows // max(1, batch.nbytes)))
        while start < batch.num_rows:
            part = batch.slice(start, most)
            read = done + start + part.num_rows
            share = read / rows if rows else 1.0
            yield Chunk(
                "table", (name,), _stream(part), part.num_rows, done + start + 1, bytes_done=round(size * share)
            )
            start += part.num_rows
        done += batch.num_rows


def _stream(batch: Any) -> bytes:
    """A record batch as an Arrow stream, which holds its own rows only and reads without a copy."""
    import pyarrow
    from pyarrow import ipc

    sink = pyarrow.BufferOutputStream()
    with ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def require_fields(names: Sequence[str], path: str, settings: DataSettings) -> list[str]:
    """Those columns of a table that documents come from. Raises ``DataError`` if they do not suffice for any."""
    has = set(names)
    wanted = [name for name in dict.fromkeys(wanted_fields(settings)) if name in has]
    for name in wanted:
        if names.count(name) > 1:
            raise DataError(f"{path} has the column {name!r} {names.count(name)} times; leave one of them")
    whole = settings.text_field in has or {settings.prompt_field, settings.completion_field} <= has
    if not whole and not has & {settings.messages_field, "conversations"}:
        raise DataError(
            f"{path} has {missing_fields(settings)}; its columns are {', '.join(map(repr, names)) or 'none'}"
        )
    if settings.weight_field and settings.weight_field not in has:
        raise DataError(f"{path} has no column {settings.weight_field!r} (data.weight_field)")
    return wanted


def import_arrow(name: str) -> Any:
    """The module ``pyarrow``. Raises ``DataError`` naming the extra that it comes with."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"reading {name} needs pyarrow, which the extra datasets brings: {EXTRA}") from None
    return pyarrow


def what_it_is(content: bytes) -> str:
    """What content is that is no text, by its first bytes, in words; empty if that cannot be told."""
    if content[:1] in FIRST_BYTES:
        for magic, words in MAGIC:
            if content.startswith(magic):
                return words
    # Small numbers, and archives of texts, are valid UTF-8.
    return "a binary file" if b"\0" in content[:4096] else ""


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what the system or a decompressor says of a file into a sentence."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {error.filename or path}: {error.strerror or error}") from None
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, error) from None


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"cannot read {path}: it is damaged or cut off ({' '.join(str(error).split())})")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """A file unpacked as its suffix says, and the packed file beneath, whose position tells how far reading is."""
    with path.open("rb") as raw:
        suffix = path.suffix.lower()
        if suffix in (".zst", ".zstd"):
            with _zstd(raw, path) as file:
                yield file, raw
        elif suffix == ".gz":
            with gzip.GzipFile(fileobj=raw) as file:
                yield cast(BinaryIO, file), raw
        elif suffix == ".bz2":
            with bz2.BZ2File(raw) as file:
                yield cast(BinaryIO, file), raw
        elif suffix == ".xz":
            with lzma.LZMAFile(raw) as file:
                yield cast(BinaryIO, file), raw
        else:
            yield raw, raw


@contextmanager
def _zstd(raw: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    try:
        import zstandard
    except ImportError:
        raise DataError(f"reading {path} needs zstandard, which the extra datasets brings: {EXTRA}") from None
    # Corpora are often packed with the longest window, which has to be allowed for.
    unpacker = zstandard.ZstdDecompressor(max_window_size=2**31)
    try:
        with io.BufferedReader(_Frames(raw, unpacker), 2**20) as file:
            yield file
    except zstandard.ZstdError as error:
        raise _damaged(path, error) from None


class _Frames(io.RawIOBase):
    """All frames of a zstd file. Raises ``EOFError`` if the last one is cut off, which the library's own stream passes over."""

    def __init__(self, raw: BinaryIO, unpacker: Any) -> None:
        self._raw, self._unpacker = raw, unpacker
        self._frame: Any = None
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._content:
            packed = self._raw.read(2**17)
            if not packed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("its last frame has no end")
                return 0
            self._content = memoryview(b"".join(self._unpacked(packed)))
        part = self._content[: len(target)]
        target[: len(part)] = part
        self._content = self._content[len(part) :]
        return len(part)

    def _unpacked(self, packed: bytes) -> Iterator[bytes]:
        while packed:
            if self._frame is None or self._frame.eof:
                self._frame = self._unpacker.decompressobj()
            yield self._frame.decompress(packed)
            packed = self._frame.unused_data
