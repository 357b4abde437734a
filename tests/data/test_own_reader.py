"""Readers of a user's own: their records are documents like any other, and what is wrong with them is said in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinipipe.data import (
    DataError,
    DataSettings,
    Document,
    ReadCounts,
    SourceSettings,
    find_shards,
    read_documents,
)
from infinipipe.data.shards import read_chunks
from infinipipe.settings import SettingError


def read(*patterns: object, **settings: Any) -> tuple[list[Document], ReadCounts]:
    chosen = DataSettings(files=[str(pattern) for pattern in patterns], **settings)
    counts = ReadCounts()
    return list(read_documents(find_shards(chosen), chosen, counts)), counts


READER = """
def paragraphs(path):
    for paragraph in path.read_text().split("\\n\\n"):
        {body}
"""


def write_reader(folder: Path, body: str = "yield {'text': paragraph}") -> str:
    (folder / "mine.py").write_text(READER.format(body=body))
    return f"{folder / 'mine.py'}:paragraphs"


def test_a_reader_of_ones_own_yields_records(tmp_path: Path) -> None:
    (tmp_path / "a.book").write_text("one\n\ntwo\n\n\n\nthree")
    documents, counts = read(tmp_path / "*.book", reader=write_reader(tmp_path))
    assert [(d.name, d.text) for d in documents] == [
        (f"{tmp_path}/a.book:{number}", text) for number, text in ((1, "one"), (2, "two"), (4, "three"))
    ]
    assert (counts.documents, counts.empty) == (3, 1)
    (shard,) = find_shards(DataSettings(files=[f"{tmp_path}/a.book"], reader=write_reader(tmp_path)))
    (chunk,) = read_chunks([shard], skip=2)
    assert [chunk.name(index) for index in range(chunk.count)] == [f"{tmp_path}/a.book:{number}" for number in (3, 4)]
    before = shard.stamp()
    write_reader(tmp_path, "yield {'text': paragraph.upper()}")
    assert shard.stamp() != before


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("yield paragraph", "a.book:1: the record is not a JSON object; set data.on_bad_record to drop"),
        ("1 / 0; yield", "a.book cannot be read: the data reader .*mine.py:paragraphs fails: ZeroDivisionError"),
        ("open('gone'); yield", "the data reader .* fails: FileNotFoundError: .* 'gone'"),
    ],
)
def test_what_a_reader_of_ones_own_does_wrong_is_named(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "a.book").write_text("one")
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a.book", reader=write_reader(tmp_path, body))


def test_readers_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    reader = write_reader(tmp_path)
    with pytest.raises(SettingError, match=r"^data.reader: cannot load the data reader file 'gone.py'"):
        DataSettings(files=["a"], reader="gone.py:f")
    with pytest.raises(SettingError, match=r"data.format and data.reader are both given"):
        DataSettings(files=["a"], reader=reader, format="csv")
    with pytest.raises(SettingError, match=r"data.reader reads files, but data has a dataset"):
        DataSettings(dataset="a", reader=reader)
    with pytest.raises(SettingError, match=r"data.sources.x.reader: the data reader file .* has no function 'f'"):
        DataSettings(sources={"x": SourceSettings(files=["a"], reader=f"{tmp_path / 'mine.py'}:f")})
