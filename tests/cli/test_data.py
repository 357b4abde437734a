"""What ``infinipipe data stats`` prints and draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinipipe.cli.main import main

CONFIG = """
[model.config]
model_type = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1

[tokenizer]
vocab_size = 257

[data]
files = ["*.jsonl"]
cache = "cache"
max_length = 64
held_out = 0
sequences_per_step = 3

[parallel]
stages = 2

[train]
output = "run"
steps = 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Documents of 3, 6, 6, 60 and 101 tokens, one for each byte and one for the end."""
    monkeypatch.chdir(tmp_path)
    texts = ["".join(chr(97 + (7 * place + size) % 23) for place in range(size)) for size in (2, 5, 5, 59, 100)]
    texts[2] = texts[2].upper()
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("run.toml").write_text(CONFIG)
    return tmp_path


def stats(*arguments: str) -> int:
    return main(["data", "stats", "run.toml", *arguments])


def test_lengths_policies_and_a_step_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stats() == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in (
        ["3", "to", "4", "1", "25.0%", "3", "4.0%", "▋"],
        ["5", "to", "8", "2", "50.0%", "12", "16.0%", "██▌"],
        ["9", "to", "16", "0", "0.0%", "0", "0.0%"],
        ["33", "to", "64", "1", "25.0%", "60", "80.0%", "████████████▊"],
        ["drop", "(chosen)", "4", "75", "1"],
        ["truncate", "5", "139", "0"],
        ["split", "6", "177", "0"],
    ):
        assert row in shown, row
    text = "\n".join(" ".join(line) for line in shown)
    assert "4 sequences to train on, 0 held out; 75 tokens" in text
    assert "sequences by tokens: 50% up to 6, 90% up to 60, 99% up to 60, the longest 60" in text
    assert "20 steps drawn: " in text
    assert "sequences cut" in text
    assert not (folder / "run").exists()


def test_settings_are_overridden_and_the_step_of_most_tokens_is_planned(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stats("--data.sequences_per_step", "4", "--steps", "3", "--data.on_too_long", "truncate") == 0
    shown = capsys.readouterr().out
    assert "truncate (chosen)" in shown
    assert "3 steps drawn: " in shown
    assert "tokens in" in shown


@pytest.mark.parametrize(("name", "begin"), [("lengths.svg", b"<svg"), ("lengths.PNG", b"\x89PNG")])
def test_lengths_are_drawn(folder: Path, name: str, begin: bytes) -> None:
    assert stats("--output", name) == 0
    content = (folder / name).read_bytes()
    assert content.startswith(begin)
    if begin == b"<svg":
        assert content.count(b"of the tokens</title>") == content.count(b"of the sequences</title>") == 3
        assert b"80.0% of the tokens" in content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say what to do with the data: infinipipe data stats CONFIG; see"),
        (["shuffle"], "invalid choice: 'shuffle'"),
        (["stats"], "name a configuration file first: infinipipe data stats CONFIG"),
        (["stats", "none.toml"], "there is no configuration file 'none.toml'"),
        (["stats", "run.toml", "--steps", "0"], "steps must be at least 1"),
        (["stats", "run.toml", "--output", "lengths.gif"], "output is 'lengths.gif'; it must end in .svg or .png"),
        (["stats", "run.toml", "--data.max_length", "2"], "no document is left to train on"),
        (["stats", "run.toml", "--data.nonsense", "2"], "there is no setting"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["data", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "Traceback" not in error
