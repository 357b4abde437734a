"""Streamed sources: nothing on disk, windows that are shuffled, places that are found again."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infinipipe.data import Batches, DataError, DataSettings, SourceSettings, TokenizerSettings, open_corpus
from tests.data.chat_templates import chat_tokenizer
from tests.data.conftest import words

DOCUMENTS = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of twenty lines, one of them packed, and a tokenizer."""
    for shard in range(3):
        lines = [json.dumps({"text": f"{20 * shard + index} {words(3, index)}"}) for index in range(20)]
        content = "".join(line + "\n" for line in lines).encode()
        if shard == 1:
            (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(content))
        else:
            (tmp_path / f"{shard}.jsonl").write_bytes(content)
    chat_tokenizer(None).save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def settings_of(folder: Path, **changes: Any) -> DataSettings:
    values: dict[str, Any] = {
        "files": [str(folder / "*.jsonl*")],
        "cache": str(folder / "cache"),
        "streaming": True,
        "shuffle_window": 8,
        "sequences_per_step": 3,
        "held_out": 0,
    }
    return DataSettings(**(values | changes))


@contextmanager
def streamed(folder: Path, state: dict[str, Any] | None = None, seed: int = 1, **changes: Any) -> Iterator[Batches]:
    data = settings_of(folder, **changes)
    corpus = open_corpus(data, TokenizerSettings(path=str(folder / "tokenizer")))
    assert corpus.stream is not None
    batches = corpus.batches(data, seed)
    if state is not None:
        assert batches.load_state_dict(json.loads(json.dumps(state))) == []
    try:
        yield batches
    finally:
        batches.close()


def take(batches: Batches, steps: int) -> list[list[str]]:
    return [[sample.name for sample in batches.next()] for _ in range(steps)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of about four lines, and workers within this process, as they cost a second each."""
    monkeypatch.setattr("infinipipe.data.readers.CHUNK_BYTES", 128)
    original = __import__("infinipipe.data.workers", fromlist=["Workers"]).Workers
    monkeypatch.setattr("infinipipe.data.stream.Workers", lambda processes, make, argument: original(0, make, argument))


def test_every_epoch_visits_every_document_once_and_nothing_is_written(folder: Path) -> None:
    with streamed(folder) as batches:
        names = [name for batch in take(batches, 2 * DOCUMENTS // 3) for name in batch]
    first, second = names[:DOCUMENTS], names[DOCUMENTS:]
    assert len(set(first)) == DOCUMENTS
    assert set(first) == set(second)
    assert first != second
    assert not (folder / "cache").exists()
    with streamed(folder, seed=2) as batches:
        assert [name for batch in take(batches, DOCUMENTS // 3) for name in batch] != first


def test_windows_are_shuffled_and_tokens_are_those_of_the_documents(folder: Path) -> None:
    with streamed(folder) as batches:
        samples = [sample for _ in range(7) for sample in batches.next()]
    numbers = [int(sample.name.rpartition(":")[2]) for sample in samples]
    assert numbers != sorted(numbers)
    for sample in samples:
        text = chat_tokenizer(None).decode(sample.tokens[:-1])
        shard, number = sample.name.rpartition("/")[2][0], int(sample.name.rpartition(":")[2])
        assert text.startswith(f"{20 * int(shard) + number - 1} ")
        assert len(sample.tokens) == len(sample.labels) == len(sample.weights) == sample.length


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 19, 20, 27, 41])
@pytest.mark.parametrize("tokens", [0, 90])
def test_resuming_is_exact(folder: Path, steps: int, tokens: int) -> None:
    with streamed(folder, tokens_per_step=tokens) as straight:
        take(straight, steps)
        state = straight.state_dict()
        expected = take(straight, 25)
    with streamed(folder, state, tokens_per_step=tokens) as resumed:
        assert resumed.state_dict() == state
        assert take(resumed, 25) == expected


def test_a_document_that_is_left_out_leaves_the_others_in_their_order(folder: Path) -> None:
    with streamed(folder) as straight:
        take(straight, 4)
        state = straight.state_dict()
        expected = [name for batch in take(straight, 10) for name in batch]
    gone = expected[2]
    with streamed(folder, state, exclude=[gone]) as resumed:
        drawn = [name for batch in take(resumed, 9) for name in batch]
    assert drawn == [name for name in expected if name != gone][: len(drawn)]


def test_held_out_documents_are_never_drawn(folder: Path) -> None:
    data = settings_of(folder, held_out=0.3, shuffle_window=30)
    corpus = open_corpus(data, TokenizerSettings(path=str(folder / "tokenizer")))
    held_out = {corpus.held_out.name(index) for index in range(len(corpus.held_out))}
    known = {corpus.train.name(index) for index in range(len(corpus.train))}
    assert held_out
    assert not held_out & known
    with streamed(folder, held_out=0.3, shuffle_window=30) as batches:
        drawn = {name for batch in take(batches, 60) for name in batch}
    assert not held_out & drawn
    assert known <= drawn
    assert any(line.startswith("streaming: the figures are those of the first") for line in corpus.report)


def test_several_sources_are_mixed_by_their_weights(folder: Path) -> None:
    sources = {
        name: SourceSettings(files=[str(folder / f"{name}.jsonl*")], weight=weight)
        for name, weight in (("0", 1), ("1", 3))
    }
    counts = {"0": 0, "1": 0}
    with streamed(folder, files=[], sources=sources) as batches:
        take(batches, 3)
        state = batches.state_dict()
        expected = take(batches, 30)
    with streamed(folder, state, files=[], sources=sources) as batches:
        assert take(batches, 30) == expected
        for _ in range(60):
            for sample in batches.next():
                counts[sample.source] += sample.length
    assert counts["1"] / sum(counts.values()) == pytest.approx(0.75, abs=0.03)


def test_positions_of_other_streams_are_refused(folder: Path) -> None:
    with streamed(folder) as batches:
        state = batches.state_dict()
    for changes in ({"shuffle_window": 9}, {"sequences_per_step": 4}, {"tokens_per_step": 7}):
        with pytest.raises(DataError, match="another corpus, seed or batch size"), streamed(folder, state, **changes):
            pass
    with pytest.raises(DataError, match="another corpus, seed or batch size"), streamed(folder, state, seed=2):
        pass
    data = settings_of(folder, streaming=False)
    corpus = open_corpus(data, TokenizerSettings(path=str(folder / "tokenizer")))
    with pytest.raises(DataError, match="another corpus, seed or batch size"):
        corpus.batches(data, 1).load_state_dict(state)
    own = corpus.batches(data, 1).state_dict()
    with pytest.raises(DataError, match="another corpus, seed or batch size"), streamed(folder, own):
        pass


def test_what_is_wrong_later_is_said_when_it_is_reached(folder: Path) -> None:
    with (folder / "2.jsonl").open("a") as file:
        file.write("{\n")
    with streamed(folder) as batches, pytest.raises(DataError, match=r"2.jsonl:21: the record is not JSON"):
        take(batches, 40)


def test_a_stream_of_which_nothing_is_left_is_said(folder: Path) -> None:
    with streamed(folder, shuffle_window=60) as batches:
        for path in folder.glob("*.jsonl*"):
            path.write_bytes(b"" if path.suffix == ".jsonl" else gzip.compress(b""))
        with pytest.raises(DataError, match="the source data has no document to train on"):
            take(batches, 100)


def test_text_files_are_streamed(folder: Path) -> None:
    for index in range(12):
        (folder / f"{index:02}.txt").write_text(words(4, index))
    with streamed(folder, files=[str(folder / "*.txt")], shuffle_window=5) as straight:
        first = [name for batch in take(straight, 4) for name in batch]
        assert len(set(first)) == 12
        take(straight, 1)
        state = straight.state_dict()
        expected = take(straight, 9)
    with streamed(folder, state, files=[str(folder / "*.txt")], shuffle_window=5) as resumed:
        assert take(resumed, 9) == expected


def test_processes_tokenize_a_stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed(folder) as batches:
        expected = take(batches, 8)
    monkeypatch.undo()
    monkeypatch.setattr("infinipipe.data.readers.CHUNK_BYTES", 128)
    with streamed(folder, workers=2) as batches:
        assert take(batches, 8) == expected
