"""Files of every format: read as what they are, or refused by their right name."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import feather, ipc, parquet

from infinipipe.data import DataError, DataSettings, Document, ReadCounts, find_shards, read_documents
from infinipipe.data.shards import read_chunks

TEXTS = ["one", 'two\nlines, \'and "quotes"', "drei ä字", "\tfour; \\ "]
RECORDS = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]


def read(*patterns: object, **settings: Any) -> tuple[list[Document], ReadCounts]:
    chosen = DataSettings(files=[str(pattern) for pattern in patterns], **settings)
    counts = ReadCounts()
    return list(read_documents(find_shards(chosen), chosen, counts)), counts


def packed(data: bytes) -> dict[str, bytes]:
    """Data as every packer leaves it, in more than one frame."""
    half = len(data) // 2
    zstd = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=27))
    parts = [data[:half], data[half:]]
    return {
        ".gz": b"".join(map(gzip.compress, parts)),
        ".bz2": b"".join(map(bz2.compress, parts)),
        ".xz": b"".join(map(lzma.compress, parts)),
        ".zst": b"".join(map(zstd.compress, parts)),
    }


def jsonl(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def rows_of(records: list[dict[str, Any]], delimiter: str) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(records[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue().encode()


def write_stream(table: pyarrow.Table, path: Path) -> None:
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, 2)


TABLE = pyarrow.Table.from_pylist(RECORDS)
WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(jsonl(RECORDS)),
    "b.ndjson": lambda path: path.write_bytes(jsonl(RECORDS)),
    "c.json": lambda path: path.write_text(json.dumps(RECORDS, indent=2)),
    "lines.json": lambda path: path.write_bytes(b"\xef\xbb\xbf" + jsonl(RECORDS)),
    "d.csv": lambda path: path.write_bytes(rows_of(RECORDS, ",")),
    "e.TSV": lambda path: path.write_bytes(rows_of(RECORDS, "\t")),
    "f.parquet": lambda path: parquet.write_table(TABLE, path, row_group_size=3),
    "g.feather": lambda path: feather.write_feather(TABLE, path, chunksize=2),
    "h.arrow": lambda path: write_stream(TABLE, path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_format_is_read_by_its_suffix(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    documents, counts = read(tmp_path / name)
    assert documents == [Document(f"{tmp_path / name}:{number}", text) for number, text in enumerate(TEXTS, 1)]
    assert (counts.files, counts.documents) == (1, len(TEXTS))


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("skip", [1, 3, 4])
def test_reading_can_begin_at_any_record(tmp_path: Path, name: str, skip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinipipe.data.readers.CHUNK_RECORDS", 2)
    WRITERS[name](tmp_path / name)
    settings = DataSettings(files=[str(tmp_path / name)])
    chunks = list(read_chunks(find_shards(settings), skip=skip))
    assert sum(chunk.count for chunk in chunks) == len(TEXTS) - skip
    assert [chunk.first for chunk in chunks][:1] == ([skip + 1] if skip < len(TEXTS) else [])


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "c.json", "d.csv", "t.txt", "t"])
def test_packed_files_are_unpacked(tmp_path: Path, name: str, suffix: str) -> None:
    plain = tmp_path / name
    WRITERS.get(name, lambda path: path.write_text("\n".join(TEXTS)))(plain)
    path = tmp_path / (name + suffix)
    path.write_bytes(packed(plain.read_bytes())[suffix])
    documents, _ = read(path)
    assert [document.text for document in documents] == [document.text for document in read(plain)[0]]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=f"cannot read .*{name}{suffix}: it is damaged or cut off"):
        read(path)
    path.write_bytes(b"this is no archive at all")
    with pytest.raises(DataError, match=f"cannot read .*{name}{suffix}"):
        read(path)


def test_a_folder_of_all_kinds(tmp_path: Path) -> None:
    for name, write in WRITERS.items():
        write(tmp_path / name)
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(jsonl(RECORDS)))
    (tmp_path / "z.txt").write_text(TEXTS[0])
    documents, counts = read(tmp_path / "*")
    assert [document.text for document in documents] == TEXTS * (len(WRITERS) + 1) + TEXTS[:1]
    assert counts.files == len(WRITERS) + 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", gzip.compress(b"hello"), "is compressed with gzip; let its name end in .gz"),
        ("a.jsonl", gzip.compress(b"{}"), "is compressed with gzip; let its name end in .gz"),
        ("a.zst.txt", zstandard.compress(b"hello"), "is compressed with zstd; let its name end in .zst"),
        ("a", bz2.compress(b"hello"), "is compressed with bzip2"),
        ("a.bin", b"\0\xff" * 99, "is a binary file"),
        ("a.bin", np.arange(100, dtype="<u2").tobytes(), "is a binary file"),
        ("a.txt", "hello".encode("utf-16"), "is text in UTF-16; write it in UTF-8"),
        ("a.pdf", b"%PDF-1.4\nall of it is plain here", "is a PDF; take the text out of it first"),
        ("a.png", b"\x89PNG\r\n\x1a\n\0", "is a PNG image"),
        ("a.data", b"PAR1\x15\xff", "is a Parquet file; let its name end in .parquet"),
    ],
)
def test_what_is_no_text_is_refused_by_its_name_and_never_repaired(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    for policy in ("error", "replace"):
        with pytest.raises(DataError, match=f"{name}.* {message}"):
            read(tmp_path / name, on_undecodable=policy)
    documents, counts = read(tmp_path / name, on_undecodable="drop")
    assert (documents, counts.undecodable) == ([], 1)


def test_a_zip_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", "hello")
    with pytest.raises(DataError, match="is a zip archive; unpack it first"):
        read(tmp_path / "a.zip", on_undecodable="replace")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[1, 2", "a.json is not JSON .*line 1.*data.format"),
        ("a.json", b"[\xff]", "a.json is not JSON .*, nor UTF-8; mend it"),
        ("a.json", b"[" * 99_999, "a.json is nested too deeply; mend it"),
        ("a.json", b'[{"text": "a", "text": "b"}]', "a.json has the field 'text' twice; mend it"),
        ("a.jsonl", b'{"text": "a", "text": "b"}', "a.jsonl:1: the record has the field 'text' twice"),
        ("a.jsonl", b'{"text": "a", "x": [{"y": 1, "y": 2}]}', "a.jsonl:1: the record has the field 'y' twice"),
        (
            "a.jsonl",
            b'{"text": "a", "x": ' + b"9" * 5000 + b"}",
            "a.jsonl:1: the record has a number of more digits than can be read",
        ),
        ("a.jsonl", b'{"text": "a"}\n' + b"\0" * 99, "a.jsonl:2: the record is not JSON"),
        ("a.csv", b"text,text\na,b\n", "a.csv has the column 'text' 2 times; leave one of them"),
        ("a.csv", "text\nabc\n".encode("utf-16"), "a.csv is text in UTF-16; write it in UTF-8"),
        ("a.csv", gzip.compress(b"text\nabc\n"), "a.csv is compressed with gzip; let its name end in .gz"),
        ("a.json", gzip.compress(b"[]"), "a.json is compressed with gzip; let its name end in .gz"),
        ("a.json", b'{"name": "package"}', "a.json:1: the record has neither the field 'text'"),
        ("a.json", b'["text"]', "a.json:1: the record is not a JSON object"),
        ("a.csv", b"id;text\n1;b\n", r"a.csv has neither the field 'text' .*; its columns are 'id;text'"),
        ("a.csv", b"", "its columns are none"),
        ("a.csv", b"text,id\na,1,2\n", "a.csv:1: the record has more fields than the file has columns"),
        ("a.csv", b"id,text\n1\n", "a.csv:1: the record has fewer fields than the file has columns"),
        ("a.csv", b'text\n"abc', "a.csv is malformed at line 1"),
        ("a.csv", b"text\na\xffb\n", "a.csv:1 is not UTF-8; set data.on_undecodable"),
        ("a.parquet", b"PAR1 and so on", "cannot read .*a.parquet: it is damaged or cut off"),
        ("a.arrow", b"ARROW1 and so on", "cannot read .*a.arrow: it is damaged or cut off"),
        ("a.parquet.gz", b"", "is a parquet file within a compressed one"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_files_can_be_taken_as_text_whatever_their_suffix(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"name": "package"}')
    documents, _ = read(tmp_path / "package.json", format="text")
    assert documents == [Document(str(tmp_path / "package.json"), '{"name": "package"}')]


def test_one_json_object_is_one_record(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(RECORDS[0], indent=1))
    assert [document.text for document in read(tmp_path / "a.json")[0]] == TEXTS[:1]
    (tmp_path / "a.json").write_text(" \n")
    assert read(tmp_path / "a.json")[0] == []


def test_undecodable_rows_follow_the_policy_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,id\ngood,1\na\xffb,2\nfine,3\n")
    binary = pyarrow.array([b"good", b"a\xffb", b"fine"], pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 3, binary.buffers())
    parquet.write_table(pyarrow.table({"text": texts, "id": [1, 2, 3]}), tmp_path / "b.parquet")
    for name in ("a.csv", "b.parquet"):
        with pytest.raises(DataError, match=f"{name}:2 is not UTF-8"):
            read(tmp_path / name)
        documents, counts = read(tmp_path / name, on_undecodable="drop")
        assert [document.text for document in documents] == ["good", "fine"]
        assert counts.undecodable == 1
        documents, counts = read(tmp_path / name, on_undecodable="replace")
        assert [document.text for document in documents] == ["good", "a\ufffdb", "fine"]
        assert counts.undecodable == 1


def test_columns_are_chosen_and_nested_ones_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "weight": 1}]
    table = pyarrow.Table.from_pylist([{"messages": chat, "x": 1.5}, {"messages": [*chat, chat[0]], "x": 2.5}])
    parquet.write_table(table, tmp_path / "a.parquet")
    first, second = read(tmp_path / "a.parquet")[0]
    assert first.chat is not None
    assert second.chat is not None
    assert first.chat.messages == [chat[0], {"role": "assistant", "content": "ho"}]
    assert len(second.chat.messages) == 3
    (tmp_path / "b.csv").write_bytes(rows_of([{"messages": json.dumps(chat)}], ","))
    assert read(tmp_path / "b.csv")[0][0].chat == first.chat
    with pytest.raises(DataError, match=r"a.parquet has no column 'w' \(data.weight_field\)"):
        read(tmp_path / "a.parquet", weight_field="w")


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet has the column 'text' 2 times"):
        read(tmp_path / "a.parquet")


def test_weights_need_fields(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match="a.txt holds no fields, so it cannot have a weight in 'w'; empty data.weight_"):
        read(tmp_path / "a.txt", weight_field="w")


def test_dictionary_columns_are_read(tmp_path: Path) -> None:
    column = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    feather.write_feather(pyarrow.table({"text": column}), tmp_path / "a.feather")
    assert [document.text for document in read(tmp_path / "a.feather")[0]] == ["a", "b", "a"]


def test_empty_completions_are_counted_as_what_they_are(tmp_path: Path) -> None:
    records = [{"prompt": "p", "completion": ""}, {"text": ""}, {"prompt": "", "completion": ""}, {"text": "x"}]
    (tmp_path / "a.jsonl").write_bytes(jsonl(records))
    documents, counts = read(tmp_path / "a.jsonl")
    assert [document.text for document in documents] == ["x"]
    assert (counts.empty, counts.empty_completions) == (2, 1)
    assert counts.describe(DataSettings(files=["x"])) == (
        "1 documents in 1 file; 2 empty, skipped; 1 with a prompt and an empty completion, skipped"
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    whole = datasets.Dataset.from_list(RECORDS)
    whole.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": whole, "test": whole.select([2])}).save_to_disk(tmp_path / "splits")
    return tmp_path


def read_dataset(folder: Path, **settings: Any) -> list[Document]:
    chosen = DataSettings(dataset=str(folder), **settings)
    return list(read_documents(find_shards(chosen), chosen, ReadCounts()))


def test_folders_that_datasets_has_saved_are_read(saved: Path) -> None:
    documents = read_dataset(saved / "saved")
    assert [document.text for document in documents] == TEXTS
    assert documents[1].name == f"{saved / 'saved'}/train:2"
    assert [document.text for document in read_dataset(saved / "splits", split="test")] == TEXTS[2:3]
    (shard,) = find_shards(DataSettings(dataset=str(saved / "saved")))
    assert [chunk.first for chunk in shard.chunks(skip=3)] == [4]


def test_shards_of_a_streamed_dataset_are_read(saved: Path) -> None:
    from infinipipe.data.hub import DatasetShard

    parquet.write_table(TABLE, saved / "a.parquet")
    parquet.write_table(TABLE, saved / "b.parquet")
    files = [str(saved / name) for name in ("a.parquet", "b.parquet")]
    streamed = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    settings = DataSettings(dataset="some/name", streaming=True)
    shards = [DatasetShard(f"some/name[{index}]", streamed.shard(2, index), settings) for index in range(2)]
    documents = list(read_documents(shards, settings, ReadCounts()))
    assert [document.text for document in documents] == TEXTS * 2
    assert documents[-1].name == "some/name[1]:4"
    assert [chunk.first for chunk in shards[1].chunks(skip=2)] == [3]


def test_datasets_that_are_none_are_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="has no split 'validation'; it has train, test; name one in data.split"):
        read_dataset(saved / "splits", split="validation")
    with pytest.raises(DataError, match="is no folder that datasets has saved"):
        read_dataset(saved)
    with pytest.raises(DataError, match="data.subset is 'en', but .*saved is a folder, which has splits only"):
        read_dataset(saved / "saved", subset="en")
    with pytest.raises(DataError, match="it is a folder that datasets has saved; name it in data.dataset"):
        read(saved / "saved")
    (saved / "saved" / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"data.dataset: .*saved cannot be loaded"):
        read_dataset(saved / "saved")

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match="there is no folder 'some/name', and no such dataset can be had: no network"):
        find_shards(DataSettings(dataset="some/name"))


@pytest.mark.parametrize(
    ("module", "name"), [("pyarrow", "f.parquet"), ("pyarrow", "g.feather"), ("zstandard", "a.jsonl.zst")]
)
def test_what_an_extra_brings_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"{name} needs {module}, .*: pip install 'infinipipe\[datasets\]'"):
        read(tmp_path / name)


def test_the_extra_for_datasets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the library datasets, an extra: pip install 'infinipipe\[datasets\]'"):
        find_shards(DataSettings(dataset="some/name"))


def write_indexed(base: Path, documents: list[list[list[int]]], dtype: str, code: int) -> None:
    """Megatron's two files, written by hand: documents of sequences of tokens."""
    sequences = [np.asarray(sequence, dtype=dtype) for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    places = np.cumsum([0, *(sequence.nbytes for sequence in sequences)])[:-1]
    borders = np.cumsum([0, *map(len, documents)])
    index = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([code])
    index += len(sequences).to_bytes(8, "little") + len(borders).to_bytes(8, "little")
    index += (
        np.asarray(lengths, "<i4").tobytes()
        + np.asarray(places, "<i8").tobytes()
        + np.asarray(borders, "<i8").tobytes()
    )
    base.with_suffix(".idx").write_bytes(index)
    base.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))


INDEXED = [[[5, 6, 7]], [[8], [9, 10]], [], [[11]]]


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4), ("<u1", 1), ("<i8", 5), ("<i2", 3)])
@pytest.mark.parametrize("pattern", ["a.bin", "a.idx", "a.*"])
def test_files_of_megatron_are_read(tmp_path: Path, dtype: str, code: int, pattern: str) -> None:
    write_indexed(tmp_path / "a", INDEXED, dtype, code)
    documents, counts = read(tmp_path / pattern)
    assert [document.tokens.tolist() for document in documents if document.tokens is not None] == [
        [5, 6, 7],
        [8, 9, 10],
        [11],
    ]
    assert [document.name for document in documents] == [f"{tmp_path / 'a.idx'}:{number}" for number in (1, 2, 4)]
    assert (counts.files, counts.documents, counts.empty) == (1, 3, 1)


def test_files_of_megatron_that_are_none_are_refused(tmp_path: Path) -> None:
    base = tmp_path / "a"
    index, tokens = base.with_suffix(".idx"), base.with_suffix(".bin")

    def refused(message: str) -> None:
        with pytest.raises(DataError, match=message):
            read(index)
        write_indexed(base, INDEXED, "<u2", 8)

    write_indexed(base, INDEXED, "<u2", 8)
    whole = index.read_bytes()
    tokens.unlink()
    refused("is an index without its tokens: there is no .*a.bin")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    refused("a.bin is cut off, or of another index than .*a.idx: it has 13 bytes")
    index.write_bytes(whole[:12])
    refused("a.idx is cut off: it ends within its header")
    index.write_bytes(whole[:-9])
    refused("a.idx is cut off: it should hold 4 sequences")
    index.write_bytes(b"MMIDIDY" + whole[7:])
    refused("a.idx is no index of Megatron-LM: it does not begin with MMIDIDX")
    index.write_bytes(whole[:17] + bytes([7]) + whole[18:])
    refused("version 1 with tokens of type 7, which is not known")
    index.write_bytes(whole[:-8] + (9).to_bytes(8, "little"))
    refused("a.idx is damaged: its documents do not divide its 4 sequences")


def test_records_of_an_array_that_are_not_utf8_follow_the_policy_one_by_one(tmp_path: Path) -> None:
    content = b'[{"text": "a\xff", "note": null}, {"text": "b"}, {"messages": [{"role": "user", "content": "\xff"}]}]'
    (tmp_path / "a.json").write_bytes(content)
    settings = DataSettings(files=[str(tmp_path / "a.json")], on_undecodable="drop")
    counts = ReadCounts()
    documents = list(read_documents(find_shards(settings), settings, counts))
    assert [(document.name[-8:], document.text) for document in documents] == [("a.json:2", "b")]
    assert counts.undecodable == 2
    replaced = replace(settings, on_undecodable="replace")
    texts = [
        document.chat.messages[0]["content"] if document.chat else document.text
        for document in read_documents(find_shards(replaced), replaced, ReadCounts())
    ]
    assert texts == ["a\ufffd", "b", "\ufffd"]


def test_records_that_hold_more_than_one_form_are_counted(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    pair = {"prompt": "p", "completion": "c"}
    records = [{"text": "t"}, {"text": "t", **chat}, {**pair, **chat}, {"prompt": "p", **chat}, {"text": None, **pair}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = DataSettings(files=[str(tmp_path / "a.jsonl")])
    counts = ReadCounts()
    documents = list(read_documents(find_shards(settings), settings, counts))
    assert [document.text or document.chat is not None for document in documents] == ["t", "t", "c", True, "c"]
    assert counts.ambiguous == 2
    assert "2 hold more than one of a text, a prompt with its completion and a chat" in counts.describe(settings)
