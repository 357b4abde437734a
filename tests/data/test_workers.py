"""Tokenizing on several processes: the same tokens, without torch, with signs of life, and ended with the one that began it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from infinipipe.data import Corpus, DataError, DataSettings, Progress, TokenizerSettings, open_corpus
from infinipipe.data.progress import Reading, cpu_seconds
from infinipipe.data.workers import Workers
from tests.data.chat_templates import CHATML, chat_tokenizer
from tests.data.conftest import words
from tests.data.work import doubling, dying, failing, modules


@pytest.mark.parametrize("processes", [0, 2])
def test_results_come_in_order(processes: int) -> None:
    with Workers(processes, doubling, 1) as workers:
        assert list(workers.map(range(30))) == [2 * number + 1 for number in range(30)]


@pytest.mark.parametrize("processes", [0, 2])
def test_the_first_failure_is_raised(processes: int) -> None:
    with Workers(processes, failing, None) as workers, pytest.raises(DataError, match="number 3"):
        list(workers.map(range(9)))


def test_workers_import_no_torch() -> None:
    with Workers(1, modules, None) as workers:
        (names,) = workers.map([None])
    assert "infinipipe.data.workers" in names
    assert "torch" not in names


def test_a_worker_that_dies_is_said() -> None:
    with Workers(2, dying, None) as workers, pytest.raises(DataError, match="has died, .*; lower data.workers from 2"):
        list(workers.map(range(9)))


def write_corpus(folder: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": words(9, n)}, {"role": "assistant", "content": words(n, n)}]}
        for n in range(1, 300)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": words(n, n)}) + "\n" for n in range(1, 900)))
    for index in range(20):
        (folder / f"{index}.txt").write_text(words(2000, index))
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.save_pretrained(folder / "tokenizer")


def opened(folder: Path, workers: int, report: Any = None, **settings: Any) -> Corpus:
    data = DataSettings(
        files=[str(folder / "*.jsonl"), str(folder / "*.txt")],
        cache=str(folder / f"cache{workers}"),
        workers=workers,
        **settings,
    )
    return open_corpus(data, TokenizerSettings(path=str(folder / "tokenizer")), report)


def test_processes_make_the_same_corpus_and_tell_how_far_they_are(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    told: list[Progress] = []
    one, two = opened(tmp_path, 1), opened(tmp_path, 2, told.append)
    (first,), (second,) = one.train.caches, two.train.caches
    for name in ("tokens", "ends", "spans", "span_ends", "weights", "keys", "shards", "numbers", "unigrams"):
        assert (getattr(first, name) == getattr(second, name)).all(), name
    assert first.counts == second.counts
    assert one.report == two.report
    assert {progress.what for progress in told} == {"tokenizing"}
    assert told[0].documents == 0
    assert told[-1].documents == len(first) == 1218
    assert told[-1].bytes_done == told[-1].bytes_total == sum(path.stat().st_size for path in tmp_path.glob("*.*[lt]"))
    assert [progress.documents for progress in told] == sorted(progress.documents for progress in told)


def test_what_is_wrong_is_said_from_a_process_too(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    with (tmp_path / "texts.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(DataError, match=r"texts.jsonl:900: the record is not JSON .* data.on_bad_record"):
        opened(tmp_path, 2)
    assert not list((tmp_path / "cache2").glob("*"))


def test_a_slow_tokenizer_works_in_processes(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path / "tokenizer")
    for index in range(4):
        (tmp_path / f"{index}.txt").write_text(words(200, index))
    one, two = (
        open_corpus(
            DataSettings(files=[str(tmp_path / "*.txt")], cache=str(tmp_path / str(workers)), workers=workers),
            TokenizerSettings(path=str(tmp_path / "tokenizer")),
        ).train.caches[0]
        for workers in (1, 2)
    )
    assert (one.tokens == two.tokens).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_one_long_document_never_looks_like_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """One line without spaces, whole, through a tokenizer written in Python."""
    monkeypatch.setattr("infinipipe.data.progress.BEAT_SECONDS", 0.1)
    ByT5Tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "line.txt").write_text("x" * 1_500_000)
    told: list[float] = []
    corpus = open_corpus(
        DataSettings(
            files=[str(tmp_path / "line.txt")],
            cache=str(tmp_path / "cache"),
            on_too_long="split",
            held_out=0,
            workers=workers,
        ),
        TokenizerSettings(path=str(tmp_path / "tokenizer")),
        lambda _: told.append(time.monotonic()),
    )
    assert corpus.train.caches[0].lengths.tolist() == [1_500_001]
    gaps = [later - earlier for earlier, later in itertools.pairwise(told)]
    assert told[-1] - told[0] > 0.5
    assert max(gaps) < 0.8 * (told[-1] - told[0])
    assert len(told) > 5


def test_beats_come_while_something_computes_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinipipe.data.progress.BEAT_SECONDS", 0.05)
    told: list[Progress] = []
    with Reading("reading", 100, told.append):
        time.sleep(0.4)
    assert len(told) == 1
    with Reading("reading", 100, told.append) as reading:
        end = cpu_seconds() + 0.4
        while cpu_seconds() < end:
            pass
        before = len(told)
        reading.step(3, 50)
    assert before >= 4
    assert (told[-1].documents, told[-1].bytes_done) == (3, 50)


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress("tokenizing", 0, 0, 5_000_000, 0.0), "tokenizing: 0 documents, 0.0 of 5.0 MB"),
        (Progress("tokenizing", 1234, 10**6, 5 * 10**6, 10), "tokenizing: 1,234 documents, 1.0 of 5.0 MB, 40 s left"),
        (Progress("reading", 9, 10**6, 61 * 10**6, 60), "reading: 9 documents, 1.0 of 61.0 MB, 60 min left"),
        (Progress("reading", 9, 10**6, 0, 60), "reading: 9 documents, 1.0 MB"),
    ],
)
def test_progress_in_words(progress: Progress, text: str) -> None:
    assert str(progress) == text


PARENT = """
import sys, time
from infinipipe.data.workers import Workers
from tests.data.work import process_number
if __name__ == "__main__":
    with Workers(1, process_number, None) as workers:
        print(next(iter(workers.map([None]))), flush=True)
        time.sleep(60)
"""


def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text():
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.05)
