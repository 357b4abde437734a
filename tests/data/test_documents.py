"""Reading documents: what is found, and what happens to everything that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinipipe.data import DataError, DataSettings, Document, ReadCounts, find_files, find_shards, read_documents
from infinipipe.data.readers import FileShard


def read(path: Path, **settings: Any) -> tuple[list[Document], ReadCounts]:
    chosen = DataSettings(files=[str(path)], **settings)
    counts = ReadCounts()
    return list(read_documents(find_shards(chosen), chosen, counts)), counts


def test_stdlib_variable_names_the_standard_library() -> None:
    files = find_files(DataSettings(files=["{stdlib}/json/*.py"], exclude=["*/tool.py"]))
    names = {file.name for file in files}
    assert {"decoder.py", "encoder.py"} <= names
    assert "tool.py" not in names


def test_environment_variables_and_home_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setenv("CORPUS", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files(DataSettings(files=["$CORPUS/a.txt", "~/a.txt"])) == [tmp_path / "a.txt"]


def test_globs_reach_into_folders_and_files_come_once(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    for name in ("b.txt", "x/a.txt", "x/y/c.txt"):
        (tmp_path / name).write_text("a")
    files = find_files(DataSettings(files=[f"{tmp_path}/**/*.txt", f"{tmp_path}/b.txt"]))
    assert [str(f.relative_to(tmp_path)) for f in files] == ["b.txt", "x/a.txt", "x/y/c.txt"]


@pytest.mark.parametrize(
    ("pattern", "exclude", "message"),
    [
        ("none*.txt", [], "no file matches"),
        ("none.txt", [], "there is no such file"),
        ("", [], "it is a folder"),
        ("a.txt", ["*/a.txt"], "excluded by data.exclude"),
        ("$NO_SUCH_VARIABLE_HERE/a", [], r"\$NO_SUCH_VARIABLE_HERE"),
        ("a$/b", [], "write \\$\\$"),
    ],
)
def test_globs_that_match_nothing_are_refused(tmp_path: Path, pattern: str, exclude: list[str], message: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=message):
        find_files(DataSettings(files=[f"{tmp_path}/{pattern}"], exclude=exclude))


def test_text_file_is_one_document_without_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    documents, counts = read(path)
    assert documents == [Document(str(path), "one\ntwo\n")]
    assert (counts.files, counts.documents) == (1, 1)


def test_empty_documents_are_counted_and_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n\n{"text": "b"}\n')
    documents, counts = read(tmp_path / "[ab].*")
    assert [document.text for document in documents] == ["b"]
    assert counts.empty == 2
    assert "2 empty, skipped" in counts.describe(DataSettings(files=["x"]))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_undecodable_bytes_follow_the_policy(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"ab\xffc" if name == "a.txt" else b'{"text": "ab\xffc"}\n')
    with pytest.raises(DataError, match=f"{name}.* is not UTF-8 at byte .*data.on_undecodable"):
        read(path)
    documents, counts = read(path, on_undecodable="drop")
    assert documents == []
    assert counts.undecodable == 1
    documents, counts = read(path, on_undecodable="replace")
    assert [document.text for document in documents] == ["ab\ufffdc"]
    assert counts.undecodable == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"body": "b"}', "neither the field 'text'"),
        ('{"prompt": "b"}', "neither the field 'text'"),
        ('{"text": 3}', "not a text"),
        ('{"text": "\\ud800"}', "unpaired surrogate"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_records_follow_the_policy(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(DataError, match=f"a.jsonl:2: the record .*{message}.*data.on_bad_record"):
        read(path)
    documents, counts = read(path, on_bad_record="drop")
    assert [document.text for document in documents] == ["good"]
    assert counts.bad_records == 1


def test_jsonl_fields_can_be_named_and_prompts_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.data"
    records = [{"body": "one\u2028two"}, {"question": "q", "answer": "a"}]
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    documents, _ = read(path, format="jsonl", text_field="body", prompt_field="question", completion_field="answer")
    assert documents == [Document(f"{path}:1", "one\u2028two"), Document(f"{path}:2", "a", "q")]


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    settings = DataSettings(files=["x"])
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt: No such file"):
        list(read_documents([FileShard(tmp_path / "gone.txt", settings)], settings, ReadCounts()))


def test_a_file_of_several_names_is_read_once_by_its_shortest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("a/x.txt").write_text("x")
    Path("linked").symlink_to("a")
    Path("a/linked.txt").symlink_to("x.txt")
    Path("a/dead.txt").symlink_to("nowhere")
    assert find_files(DataSettings(files=["**/*.txt", f"{tmp_path}/a/*.txt"])) == [Path("a/x.txt")]


@pytest.mark.parametrize("target", [".", "..", "../../a"])
def test_links_that_lead_back_are_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x.txt").write_text("x")
    for name in ("first", "second"):
        (tmp_path / "a" / "b" / name).symlink_to(target)
    with pytest.raises(DataError, match=r"follows the symbolic link .*(first|second) back to"):
        find_files(DataSettings(files=[f"{tmp_path}/**/*"]))


@pytest.mark.parametrize("pattern", ["**/*.none", "a/**/b/**/*.none", "**", "c/**/.hidden/**/x"])
def test_links_that_lead_back_are_refused_where_no_file_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("a/b").symlink_to(".")
    Path("c/.hidden").mkdir(parents=True)
    Path("c/.hidden/back").symlink_to(".")
    with pytest.raises(DataError, match=r"follows the symbolic link .*(b|back) back to"):
        find_files(DataSettings(files=[pattern]))


def test_a_link_that_leads_back_is_followed_once_without_a_recursive_glob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("x")
    Path("back").symlink_to(".")
    assert find_files(DataSettings(files=["*/*.txt", "*.txt"])) == [Path("x.txt")]
