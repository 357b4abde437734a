"""Several sources: their settings, weights and counts; and documents that are left out by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinipipe.data import (
    Corpus,
    DataError,
    DataSettings,
    SourceSettings,
    TokenizerSettings,
    open_corpus,
    tokens_by_source,
)
from infinipipe.settings import SettingError
from tests.data.conftest import words

TOKENIZER = TokenizerSettings(vocab_size=257)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty texts and thirty lines with a field of their own."""
    for index in range(20):
        (tmp_path / f"{index:02}.txt").write_text(words(20, index))
    lines = [{"body": words(5, 100 + index)} for index in range(30)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def opened(folder: Path, texts: float = 0, lines: float = 0, **settings: Any) -> tuple[Corpus, DataSettings]:
    sources = {
        "texts": SourceSettings(files=[str(folder / "*.txt")], weight=texts),
        "lines": SourceSettings(files=[str(folder / "lines.jsonl")], weight=lines, text_field="body"),
    }
    data = DataSettings(
        sources=sources, cache=str(folder / "cache"), sequences_per_step=5, **{"held_out": 0, **settings}
    )
    return open_corpus(data, TOKENIZER), data


def test_without_weights_sources_are_one_corpus(folder: Path) -> None:
    corpus, data = opened(folder)
    train = corpus.train
    assert len(train) == 50
    assert train.names == ("texts", "lines")
    assert [train.source(index) for index in (0, 19, 20, 49)] == ["texts", "texts", "lines", "lines"]
    assert corpus.tokenizer.decode(train.tokens(20)[:-1]) == words(5, 100)
    batches = corpus.batches(data, seed=0)
    drawn = [sample for _ in range(10) for sample in batches.next()]
    assert len({sample.name for sample in drawn}) == 50
    assert tokens_by_source(drawn) == train.tokens_of_sources()
    assert any(line.startswith("texts: 20 documents in 20 files") for line in corpus.report)
    assert any(line.startswith("lines: 30 documents in 1 file") for line in corpus.report)
    counts = train.tokens_of_sources()
    assert corpus.report[-2:] == (
        f"texts: 20 sequences of {counts['texts']} tokens to train on",
        f"lines: 30 sequences of {counts['lines']} tokens to train on",
    )


def test_weights_are_shares_of_the_tokens(folder: Path) -> None:
    corpus, data = opened(folder, texts=1, lines=3)
    assert corpus.report[-1].endswith("75.0% of the tokens drawn")
    batches = corpus.batches(data, seed=0)
    counts = {"texts": 0, "lines": 0}
    for _ in range(60):
        for name, tokens in tokens_by_source(batches.next()).items():
            counts[name] += tokens
    assert counts["lines"] / sum(counts.values()) == pytest.approx(0.75, abs=0.02)


def test_a_new_source_leaves_the_tokens_of_the_others(folder: Path) -> None:
    one = DataSettings(files=[str(folder / "*.txt")], cache=str(folder / "cache"), held_out=0)
    open_corpus(one, TOKENIZER)
    (tokenizer,) = (folder / "cache").glob("tokenizer-*")
    before = set((folder / "cache").glob("tokens-*"))
    _, data = opened(folder)
    path = TokenizerSettings(path=str(tokenizer))
    open_corpus(data, path)
    found = set((folder / "cache").glob("tokens-*"))
    open_corpus(one, path)
    assert set((folder / "cache").glob("tokens-*")) == found > before


def test_a_source_of_which_nothing_is_left_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match="no document is left to train on in the source texts: .*dropped"):
        opened(folder, texts=1, lines=1, max_length=60)
    assert len(opened(folder, max_length=60)[0].train.tokens_of_sources()) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "data.files is empty"),
        ({"files": ["a"], "dataset": "b"}, "data.files and data.dataset are both given"),
        ({"files": ["a"], "sources": {"b": SourceSettings(files=["c"])}}, "data.files and data.sources are both given"),
        ({"files": ["a"], "split": "test"}, "data.subset and data.split belong to a data.dataset"),
        ({"sources": {"b": SourceSettings()}}, "data.sources.b needs either files or a dataset"),
        ({"sources": {"b": SourceSettings(files=["c"], split="x")}}, "data.sources.b has a subset or a split"),
        ({"sources": {"b": SourceSettings(files=["c"], weight=-1)}}, "data.sources.b.weight must be at least 1e-09"),
        ({"sources": {"b": SourceSettings(files=["c"], weight=float("inf"))}}, "data.sources.b.weight must be at most"),
        (
            {"sources": {"b": SourceSettings(files=["c"], weight=1), "d": SourceSettings(files=["e"])}},
            "data.sources.d has no weight, but others have",
        ),
        (
            {"sources": {name: SourceSettings(files=["c"]) for name in "bd"}, "streaming": True},
            "data.streaming needs a weight for each of several data.sources",
        ),
        ({"files": ["a"], "template_options": {"messages": 1}}, "data.template_options must not hold messages"),
        ({"dataset": "a", "format": "csv"}, "data.format is csv, which is for data.files; a data.dataset has its own"),
        (
            {"sources": {"b": SourceSettings(dataset="c", format="csv")}},
            "data.sources.b has a format, which is for files; a dataset has its own",
        ),
        ({"files": ["a"], "workers": -1}, "data.workers must be at least 0"),
        ({"files": ["a"], "shuffle_window": 0}, "data.shuffle_window must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        DataSettings(**settings)


def test_a_format_for_all_is_that_of_files_only() -> None:
    sources = {"a": SourceSettings(files=["c"]), "b": SourceSettings(dataset="d")}
    of_sources = DataSettings(sources=sources, format="csv").of_sources()
    assert [settings.format for settings in of_sources.values()] == ["csv", "auto"]


def test_documents_are_left_out_by_name_and_the_run_goes_on(folder: Path) -> None:
    corpus, data = opened(folder)
    batches = corpus.batches(data, seed=4)
    for _ in range(4):
        batches.next()
    state = json.loads(json.dumps(batches.state_dict()))
    rest = [sample.name for _ in range(6) for sample in batches.next()]
    bad = next(name for name in rest if "lines.jsonl:" in name)
    gone = next(name for name in rest if name.endswith(".txt"))
    caches = set((folder / "cache").glob("tokens-*"))
    (tokenizer,) = (folder / "cache").glob("tokenizer-*")
    _, changed = opened(folder, exclude=[bad, gone])
    other = open_corpus(changed, TokenizerSettings(path=str(tokenizer)))
    assert "lines: 1 documents left out by data.exclude" in other.report
    assert len(other.train) == 48
    resumed = other.batches(changed, seed=4)
    (line,) = resumed.load_state_dict(state)
    assert line.startswith("the corpus has changed since: 96.0%")
    drawn = [sample.name for _ in range(6) for sample in resumed.next()]
    expected = [name for name in rest if name not in (bad, gone)]
    assert drawn[: len(expected)] == expected
    assert len(set((folder / "cache").glob("tokens-*")) - caches) <= 3


def test_a_pattern_that_names_no_document_is_said(folder: Path) -> None:
    corpus, _ = opened(folder, exclude=[str(folder / "lines.jsonl:31"), "*lines.jsonl:30"])
    assert f"data.exclude names '{folder / 'lines.jsonl'}:31', but there is no such document" in corpus.report
    assert len(corpus.train) == 49


def test_parts_of_split_documents_are_named_held_out_together_and_learnt_once(folder: Path) -> None:
    _, data = opened(folder, on_too_long="split", max_length=16, held_out=0.3)
    corpus = open_corpus(data, TOKENIZER)
    names = {}
    for part in (corpus.train, corpus.held_out):
        documents = {part.name(index).partition(" (")[0] for index in range(len(part))}
        names[id(part)] = documents
        learnt: dict[str, list[int]] = {}
        whole: dict[str, list[int]] = {}
        for index in range(len(part)):
            document = part.name(index).partition(" (")[0]
            assert 2 <= part.lengths[index] <= 16
            learnt.setdefault(document, []).extend(part.labels(index)[:-1].tolist())
            cache = part.caches[part.sources[index]]
            place = int(part.documents[index])
            start = int(cache.ends[place - 1]) if place else 0
            whole[document] = cache.tokens[start : cache.ends[place]].tolist()
        assert learnt == {name: tokens[1:] for name, tokens in whole.items()}
    first, second = names.values()
    assert first
    assert second
    assert not first & second
    assert any("tokens 15 to 31" in corpus.train.name(index) for index in range(len(corpus.train)))
    assert any(" split into " in line for line in corpus.report)
