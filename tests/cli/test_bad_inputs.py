"""Wrong inputs, each through the command line: one sentence that names what is wrong, a non-zero exit, and nothing written."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from infinipipe.cli.main import main
from tests.data.chat_templates import CHATML, CHATML_MARKED, chat_tokenizer

CONFIG = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
[tokenizer]
vocab_size = 300
[data]
held_out = 0
"""
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def lines(*records: Any) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def table(*columns: Any, names: tuple[str, ...] = ("text",)) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_arrays([pa.array(column) for column in columns], names=names), file)
    return file.getvalue()


def undecodable_chat() -> bytes:
    """A Parquet file with a chat whose content is not UTF-8."""
    offsets = pa.array([0, 2], pa.int32()).buffers()[1]
    content = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"a\xff")])
    message = pa.StructArray.from_arrays([pa.array(["assistant"]), content], ["role", "content"])
    file = io.BytesIO()
    messages = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), message)
    parquet.write_table(pa.table({"messages": messages}), file)
    return file.getvalue()


PARQUET = table(["abc " * 50] * 300)
FILES: list[tuple[str, bytes, str]] = [
    ("a.txt", b"", "data.files holds no usable document: 0 documents in 1 file; 1 empty"),
    ("a.txt.gz", b"", "data.files holds no usable document"),
    ("a.jsonl", b"", "data.files holds no usable document"),
    ("a.json", b"", "data.files holds no usable document"),
    ("a.csv", b"", "a.csv has neither the field 'text'"),
    ("a.csv", b"text\n", "data.files holds no usable document"),
    ("a.parquet", b"", "a.parquet: it is damaged or cut off"),
    ("a.parquet", table(pa.array([], pa.string())), "data.files holds no usable document"),
    ("a.arrow", b"", "a.arrow: it is damaged or cut off"),
    ("a.txt", b"abc\xff", "a.txt is not UTF-8 at byte 3; set data.on_undecodable"),
    ("a.json", b'[{"text": "a\xff"}]', "a.json:1 is not UTF-8; set data.on_undecodable"),
    ("a.csv", "text\ncafé\n".encode("latin-1"), "a.csv:1 is not UTF-8"),
    ("a.parquet", undecodable_chat(), "a.parquet:1 is not UTF-8"),
    ("a.txt", "hello".encode("utf-16"), "a.txt is text in UTF-16; write it in UTF-8"),
    ("a.bin", b"\5\0\7\0" * 50, "a.bin is a binary file"),
    ("a.jsonl.gz", gzip.compress(lines({"text": "abc" * 500}))[:-9], "a.jsonl.gz: it is damaged or cut off"),
    ("a.txt.bz2", bz2.compress(b"abc" * 9000)[:-5], "a.txt.bz2: it is damaged or cut off"),
    ("a.txt.xz", lzma.compress(b"abc" * 9000)[:-5], "a.txt.xz: it is damaged or cut off"),
    ("a.txt.zst", b"(\xb5/\xfd\x04X", "a.txt.zst: it is damaged or cut off"),
    ("a.txt.gz", b"no gzip at all", "cannot read"),
    ("a.parquet", PARQUET[: len(PARQUET) // 2], "a.parquet: it is damaged or cut off"),
    ("a.parquet", PARQUET[:60] + b"\0" * 40 + PARQUET[100:], "cannot read"),
    ("a.parquet", table(["a"], names=("body",)), "a.parquet has neither the field 'text'.*its columns are 'body'"),
    ("a.parquet", table([1]), "a.parquet:1: the record has a field 'text' that is not a text"),
    (
        "a.parquet",
        table(["a"], ["b"], names=("text", "text")),
        "a.parquet has the column 'text' 2 times; leave one of them",
    ),
    ("a.csv", b"text,text\na,b\n", "a.csv has the column 'text' 2 times; leave one of them"),
    ("a.csv", b"text,b\na,b,c\n", "a.csv:1: the record has more fields than the file has columns"),
    ("a.csv", b"b,text\na\n", "a.csv:1: the record has fewer fields than the file has columns"),
    ("a.csv", b'text\n"abc\n', "a.csv is malformed at line 1"),
    ("a.csv", gzip.compress(b"text\na\n"), "a.csv is compressed with gzip; let its name end in .gz"),
    ("a.json", PARQUET, "a.json is a Parquet file; let its name end in .parquet"),
    ("a.jsonl", b"PK\3\4" + b"\0" * 99, "a.jsonl:1 is a zip archive; unpack it first"),
    ("a.jsonl", b"5\n", "a.jsonl:1: the record is not a JSON object"),
    ("a.jsonl", b"[" * 99_999, "a.jsonl:1: the record is nested too deeply"),
    (
        "a.jsonl",
        b'{"text": "a", "n": ' + b"9" * 5000 + b"}",
        "a.jsonl:1: the record has a number of more digits than can be read",
    ),
    ("a.json", b'[{"text": "a", "n": ' + b"9" * 5000 + b"}]", "a.json has a number of more digits than can be read"),
    ("a.jsonl", b'{"text": "a", "text": "b"}', "a.jsonl:1: the record has the field 'text' twice"),
    ("a.json", b'[{"text": "a", "text": "b"}]', "a.json has the field 'text' twice"),
    ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl:1: the record has a field 'text' with an unpaired surrogate"),
    ("a.json", b'{"data": [{"text": "a"}]}', "a.json:1: the record has neither the field 'text'"),
    ("a.idx", b"MMID", "cannot read .*a.bin: No such file"),
    ("a.jsonl", lines({"messages": [USER, ASSISTANT]}), "a.jsonl:1 is a chat, but the tokenizer has no chat template"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [USER]}, "has no message of an assistant to learn from"),
    ({"messages": []}, "has a field 'messages' that is not a list of messages"),
    ({"messages": [{"role": 3, "content": "x"}]}, "has a message 1 without a role"),
    ({"messages": [USER, {"role": "assistant", "content": 5}]}, "has a message 2 whose content is not a text"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": 5}]}, "has a message 2 whose tool_calls are not a list"),
    ({"messages": [USER, {"role": "assistant", "content": "a", "weight": [1]}]}, r"message 2 whose weight is \[1\]"),
    ({"conversations": [{"from": ["a"], "value": "x"}]}, r"has a message 1 from \['a'\]; known are human"),
    ({"conversations": [{"from": "human", "value": 5}]}, "has a message 1 whose content is not a text"),
    ({"prompt": [USER], "completion": []}, "has no message of an assistant to learn from"),
    ({"prompt": [1], "completion": [2]}, "has a message 1 that is not a JSON object"),
    ({"messages": [USER, ASSISTANT], "tools": "x"}, "has a field 'tools' that is not JSON"),
    (
        {"messages": [USER, ASSISTANT], "chat_template_kwargs": {"add_generation_prompt": True}},
        "has 'add_generation_prompt' in 'chat_template_kwargs'",
    ),
    ({"messages": [USER, {"role": "assistant", "content": "\ufdd0"}]}, "has a message with a noncharacter"),
]
TEMPLATES = [
    ("{% for %}", "the chat template is malformed at line 1"),
    ("{{ messages.a.b }}", "cannot be rendered by the chat template"),
    (" ", "tokenizer.chat_template: .* is empty"),
    ("nothing but text", "has a message 2 of which the chat template makes no text to learn"),
]
OPTIONS = [
    ("--data.max_length=2", "no document is left to train on"),
    ("--data.weight_field=w", "a.txt holds no fields, so it cannot have a weight in 'w'"),
    ("--data.format=json", "a.txt is not JSON"),
    ("--data.format=parquet", "a.txt: it is damaged or cut off"),
    ('--data.template_options={"tools": 1}', "data.template_options must not hold tools"),
    ('--data.exclude=["*/a.txt"]', "all its 1 files are excluded by data.exclude"),
    ("--data.dataset=x", "data.files and data.dataset are both given"),
    ("--data.sources.a.weight=2", "data.files and data.sources are both given"),
    ("--tokenizer.path=nowhere.json", "there is no folder 'nowhere.json'"),
    (
        "--tokenizer.path=nowhere/tok",
        "there is no folder 'nowhere/tok', and the hub, which was asked, gives no tokenizer",
    ),
    ("--data.cache=CONFIG", "cannot write the folder"),
    ("--data.shufle_window=2", "there is no setting data.shufle_window"),
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, template in {"chatml": CHATML, "marked": CHATML_MARKED}.items():
        chat_tokenizer(template).save_pretrained(folder / name)
    return folder


def refused(folder: Path, name: str, content: bytes, *options: str) -> None:
    """Run the command on a file; the caller looks at what it printed."""
    (folder / name).write_bytes(content)
    config = folder / "config.toml"
    config.write_text(CONFIG + f'files = ["{folder / name}"]\ncache = "{folder / "cache"}"\n')
    given = [option.replace("CONFIG", str(config)) for option in options]
    assert main(["data", "stats", str(config), *given]) == 2


def require_sentence(capsys: pytest.CaptureFixture[str], pattern: str) -> None:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("infinipipe: error: ")
    assert re.search(pattern, line), line


@pytest.mark.parametrize(("name", "content", "pattern"), FILES)
def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, pattern: str) -> None:
    refused(tmp_path, name, content)
    require_sentence(capsys, pattern)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == sorted([name, "config.toml"])
    assert not list(tmp_path.glob("cache/tokens-*"))


@pytest.mark.parametrize(("record", "pattern"), CHATS)
@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_chats(
    tmp_path: Path,
    tokenizers: Path,
    capsys: pytest.CaptureFixture[str],
    record: dict[str, Any],
    pattern: str,
    template: str,
) -> None:
    refused(tmp_path, "a.jsonl", lines(record), f"--tokenizer.path={tokenizers / template}")
    require_sentence(capsys, f"a.jsonl:1: the record .*{pattern}")
    assert not list(tmp_path.glob("cache/*"))


@pytest.mark.parametrize(("template", "pattern"), TEMPLATES)
def test_templates(
    tmp_path: Path, tokenizers: Path, capsys: pytest.CaptureFixture[str], template: str, pattern: str
) -> None:
    (tmp_path / "own.jinja").write_text(template)
    options = [f"--tokenizer.path={tokenizers / 'chatml'}", f"--tokenizer.chat_template={tmp_path / 'own.jinja'}"]
    refused(tmp_path, "a.jsonl", lines({"messages": [USER, ASSISTANT]}), *options)
    require_sentence(capsys, pattern)
    assert not list(tmp_path.glob("cache/*"))


@pytest.mark.parametrize(("option", "pattern"), OPTIONS)
def test_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, pattern: str) -> None:
    refused(tmp_path, "a.txt", b"some words", option)
    require_sentence(capsys, pattern)


def test_a_tokenizer_that_is_no_folder_is_named_without_asking_the_hub_if_that_is_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(tmp_path, "a.txt", b"some words", "--tokenizer.path=nowhere/tok")
    require_sentence(capsys, "there is no folder 'nowhere/tok', and the hub was not asked .* HF_HUB_OFFLINE is set")
