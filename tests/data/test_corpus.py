"""Tokenizing, caching, splitting and labelling."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from infinipipe.data import (
    IGNORED,
    Corpus,
    DataError,
    DataSettings,
    Progress,
    TokenizerSettings,
    open_corpus,
)

TOKENIZER = TokenizerSettings(vocab_size=300)
Settings = Callable[..., DataSettings]


def texts(corpus: Corpus) -> set[str]:
    parts = (corpus.train, corpus.held_out)
    return {corpus.tokenizer.decode(part.tokens(i)[:-1]) for part in parts for i in range(len(part))}


def test_sequences_are_the_documents_and_an_end(corpus_settings: Settings, tmp_path: Path) -> None:
    corpus = open_corpus(corpus_settings(), TOKENIZER)
    assert texts(corpus) == {path.read_text() for path in tmp_path.glob("*.txt")}
    for part in (corpus.train, corpus.held_out):
        for i in range(len(part)):
            tokens, labels = part.tokens(i), part.labels(i)
            assert tokens[-1] == corpus.tokenizer.eos_token_id
            assert len(tokens) == part.lengths[i]
            assert (labels[:-1] == tokens[1:]).all()
            assert labels[-1] == IGNORED


def test_trained_tokenizer_loads_as_hugging_face_has_it(corpus_settings: Settings, tmp_path: Path) -> None:
    corpus = open_corpus(corpus_settings(), TOKENIZER)
    assert len(corpus.tokenizer) <= 300
    (folder,) = (tmp_path / "cache").glob("tokenizer-*")
    again = open_corpus(corpus_settings(), TokenizerSettings(path=str(folder)))
    odd = "naïve 字\n\tx  y <|endoftext|>"
    ids = again.tokenizer(odd, split_special_tokens=True)["input_ids"]
    assert ids == corpus.tokenizer(odd, split_special_tokens=True)["input_ids"]
    assert again.tokenizer.decode(ids) == odd


def test_special_token_spelled_in_a_text_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("before <|endoftext|> after")
    (tmp_path / "b.txt").write_text("another text")
    settings = DataSettings(files=[str(tmp_path / "*.txt")], cache=str(tmp_path / "cache"), held_out=0)
    corpus = open_corpus(settings, TOKENIZER)
    for i in range(2):
        assert (corpus.train.tokens(i) == corpus.tokenizer.eos_token_id).sum() == 1


def test_second_opening_reads_the_cache(corpus_settings: Settings) -> None:
    calls: list[str] = []

    def progress(reached: Progress) -> None:
        assert 0 <= reached.bytes_done <= reached.bytes_total
        calls.append(reached.what)

    first = open_corpus(corpus_settings(), TOKENIZER, progress)
    assert set(calls) == {"training the tokenizer", "tokenizing"}
    calls.clear()
    second = open_corpus(corpus_settings(), TOKENIZER, progress)
    assert calls == []
    assert (first.train.caches[0].tokens == second.train.caches[0].tokens).all()
    assert first.report == second.report


def test_changed_file_makes_a_new_cache(corpus_settings: Settings, tmp_path: Path) -> None:
    open_corpus(corpus_settings(), TOKENIZER)
    (tmp_path / "doc03.txt").write_text("now something else entirely")
    assert "now something else entirely" in texts(open_corpus(corpus_settings(), TOKENIZER))


def test_touched_file_makes_a_new_cache(corpus_settings: Settings, tmp_path: Path) -> None:
    first = open_corpus(corpus_settings(), TOKENIZER)
    os.utime(tmp_path / "doc03.txt", ns=(1, 1))
    assert open_corpus(corpus_settings(), TOKENIZER).train.caches[0].folder != first.train.caches[0].folder


def test_interrupted_tokenizing_leaves_nothing_that_looks_whole(
    corpus_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("infinipipe.data.tokenize.Encoder.encode", fail)
        with pytest.raises(KeyboardInterrupt):
            open_corpus(corpus_settings(), TOKENIZER)
    assert not list((tmp_path / "cache").glob("tokens-*"))
    assert len(texts(open_corpus(corpus_settings(), TOKENIZER))) == 20


def test_too_long_documents_follow_the_policy(corpus_settings: Settings) -> None:
    whole = open_corpus(corpus_settings(held_out=0), TOKENIZER).train.lengths
    limit = int(np.sort(whole)[-3]) - 1
    dropped = open_corpus(corpus_settings(held_out=0, max_length=limit), TOKENIZER)
    assert sorted(dropped.train.lengths) == sorted(whole[whole <= limit])
    assert f"3 documents (15.0%) above {limit} tokens, dropped" in dropped.report
    cut = open_corpus(corpus_settings(held_out=0, max_length=limit, on_too_long="truncate"), TOKENIZER)
    assert sorted(cut.train.lengths) == sorted(np.minimum(whole, limit))
    longest = int(np.argmax(cut.train.lengths))
    assert cut.train.tokens(longest)[-1] != cut.tokenizer.eos_token_id
    assert cut.train.labels(longest)[-1] == IGNORED
    with pytest.raises(DataError, match=rf"doc\d\d.txt has \d+ tokens, data.max_length is {limit} \(3 such"):
        open_corpus(corpus_settings(max_length=limit, on_too_long="error"), TOKENIZER)


def test_truncation_drops_what_loses_all_of_its_completion(tmp_path: Path) -> None:
    records = [
        {"prompt": "p" * 20, "completion": "lost"},
        {"prompt": "p" * 10, "completion": "lost"},
        {"prompt": "p" * 9, "completion": "cut"},
        {"prompt": "p", "completion": "whole"},
        {"text": "t" * 30},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = DataSettings(
        files=[str(tmp_path / "a.jsonl")],
        cache=str(tmp_path / "cache"),
        held_out=0,
        sequences_per_step=3,
        max_length=10,
        on_too_long="truncate",
    )
    corpus = open_corpus(settings, TokenizerSettings(vocab_size=257))
    assert corpus.report[2:] == (
        "4 documents (80.0%) above 10 tokens, truncated; 2 of them lost all that is to be learnt, dropped",
    )
    assert corpus.train.lengths.tolist() == [10, 7, 10]
    assert [int((corpus.train.labels(index) != IGNORED).sum()) for index in range(3)] == [1, 6, 9]
    (tmp_path / "a.jsonl").write_text(json.dumps(records[0]) + "\n")
    with pytest.raises(
        DataError, match=r"no document is left .* 1 of them lost all that is to be learnt.*data\.max_length"
    ):
        open_corpus(settings, TokenizerSettings(vocab_size=257))


def test_a_step_that_repeats_sequences_is_reported(corpus_settings: Settings) -> None:
    def report(**changes: int) -> str:
        return "\n".join(open_corpus(corpus_settings(held_out=0, **changes), TOKENIZER).report)

    total = int(open_corpus(corpus_settings(held_out=0), TOKENIZER).train.lengths.sum())
    warning = "data.sequences_per_step is 21, but there are only 20 sequences to train on, so a step repeats sequences"
    assert warning in report(sequences_per_step=21)
    assert warning in report(sequences_per_step=21, tokens_per_step=2 * total)
    assert "repeats" not in report(sequences_per_step=20)
    assert "repeats" not in report(sequences_per_step=21, tokens_per_step=total)


def test_prompts_are_read_but_not_learnt(tmp_path: Path) -> None:
    records = [{"prompt": "alpha beta", "completion": "gamma"}, {"text": "gamma delta"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = DataSettings(files=[str(tmp_path / "a.jsonl")], cache=str(tmp_path / "cache"), held_out=0)
    corpus = open_corpus(settings, TokenizerSettings(vocab_size=257))
    tokens, labels = corpus.train.tokens(0), corpus.train.labels(0)
    assert corpus.tokenizer.decode(tokens[:-1]) == "alpha betagamma"
    assert (labels[: len("alpha beta") - 1] == IGNORED).all()
    assert corpus.tokenizer.decode(labels[len("alpha beta") - 1 : -1]) == "gamma<|endoftext|>"
    assert (corpus.train.labels(1)[:-1] != IGNORED).all()


def test_equal_texts_are_held_out_together_and_everywhere(corpus_settings: Settings, tmp_path: Path) -> None:
    def held_out() -> set[str]:
        part = (corpus := open_corpus(corpus_settings(held_out=0.3), TOKENIZER)).held_out
        return {corpus.tokenizer.decode(part.tokens(i)[:-1]) for i in range(len(part))}

    before = held_out()
    assert 0 < len(before) < 20
    for path in list(tmp_path.glob("*.txt")):
        (tmp_path / f"copy of {path.name}").write_text(path.read_text())
    assert held_out() == before
    corpus = open_corpus(corpus_settings(held_out=0.3), TOKENIZER)
    assert len(corpus.held_out) == 2 * len(before)


def test_small_share_still_holds_one_document_out(corpus_settings: Settings) -> None:
    corpus = open_corpus(corpus_settings(held_out=1e-6), TOKENIZER)
    assert (len(corpus.train), len(corpus.held_out)) == (19, 1)


def test_unigram_entropy_of_known_counts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aaab")
    settings = DataSettings(files=[str(tmp_path / "a.txt")], cache=str(tmp_path / "cache"), held_out=0)
    entropy = open_corpus(settings, TokenizerSettings(vocab_size=257)).unigram_entropy
    shares = (3 / 5, 1 / 5, 1 / 5)
    assert entropy == pytest.approx(-sum(share * math.log(share) for share in shares))


@pytest.mark.parametrize(
    ("content", "held_out", "message"), [("", 0.1, "no usable document"), ("a", 0.1, "no document is left")]
)
def test_corpus_without_sequences_is_refused(tmp_path: Path, content: str, held_out: float, message: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    settings = DataSettings(files=[str(tmp_path / "a.txt")], cache=str(tmp_path / "cache"), held_out=held_out)
    with pytest.raises(DataError, match=message):
        open_corpus(settings, TokenizerSettings(vocab_size=257))


def test_missing_tokenizer_is_named(corpus_settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"tokenizer.path: there is no folder .*/nowhere', and the hub, which was asked, gives no tokenizer of that name",
    ):
        open_corpus(corpus_settings(), TokenizerSettings(path=str(tmp_path / "nowhere")))


def test_beginning_token_must_exist(corpus_settings: Settings) -> None:
    with pytest.raises(DataError, match="no beginning-of-sequence token"):
        open_corpus(corpus_settings(), TokenizerSettings(vocab_size=300, bos="always"))


@pytest.mark.parametrize("name", ["meta.json", "index.npz", "tokens.bin"])
@pytest.mark.parametrize("content", [None, b"", b"junk"])
def test_a_damaged_cache_is_named(corpus_settings: Settings, tmp_path: Path, name: str, content: bytes | None) -> None:
    open_corpus(corpus_settings(), TOKENIZER)
    file = next((tmp_path / "cache").glob("tokens-*")) / name
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"the tokenized corpus .* is damaged .*; delete it"):
        open_corpus(corpus_settings(), TOKENIZER)


def test_a_cache_that_cannot_be_written_is_named(corpus_settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot write the folder '.*doc00\.txt/tokenizer-.*': "):
        open_corpus(corpus_settings(cache=str(tmp_path / "doc00.txt")), TOKENIZER)


def test_nothing_left_to_train_on_says_why(corpus_settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"20 documents \(100.0%\) above 2 tokens, dropped; raise data.max_length"):
        open_corpus(corpus_settings(max_length=2), TOKENIZER)
    with pytest.raises(DataError, match=r"add other documents or set data.held_out to 0"):
        open_corpus(corpus_settings(files=[str(tmp_path / "doc00.txt")]), TOKENIZER)


def test_a_start_from_the_cache_reads_no_token(corpus_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_corpus(corpus_settings(max_length=60, on_too_long="truncate"), TOKENIZER)

    class Unread:
        def __init__(self, path: Path, dtype: str, mode: str) -> None:
            self.size = path.stat().st_size // np.dtype(dtype).itemsize

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, place: object) -> None:
            raise AssertionError("tokens were read")

    with monkeypatch.context() as patch:
        patch.setattr("infinipipe.data.cache.np.memmap", Unread)
        again = open_corpus(corpus_settings(max_length=60, on_too_long="truncate"), TOKENIZER)
        with pytest.raises(AssertionError, match="tokens were read"):
            again.train.tokens(0)
    assert again.unigram_entropy == first.unigram_entropy
    assert again.report == first.report


def test_unigram_entropy_is_of_what_is_learnt(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "zzzzzzzz", "completion": "aaab"}) + "\n")
    settings = DataSettings(files=[str(tmp_path / "a.jsonl")], cache=str(tmp_path / "cache"), held_out=0)
    entropy = open_corpus(settings, TokenizerSettings(vocab_size=257)).unigram_entropy
    assert entropy == pytest.approx(-sum(share * math.log(share) for share in (3 / 5, 1 / 5, 1 / 5)))


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    begin = time.monotonic()
    with pytest.raises(
        DataError,
        match="there is no folder 'nowhere/tok', and the hub, which was asked, gives no tokenizer of that name",
    ):
        open_corpus(DataSettings(files=[__file__]), TokenizerSettings(path="nowhere/tok"))
    assert time.monotonic() - begin < 20
    (tmp_path / "nowhere" / "tok").mkdir(parents=True)
    with pytest.raises(DataError, match="tokenizer.path: no tokenizer can be loaded from 'nowhere/tok'"):
        open_corpus(DataSettings(files=[__file__]), TokenizerSettings(path="nowhere/tok"))


def test_equal_corpora_have_equal_orders_wherever_they_lie(corpus_settings: Settings, tmp_path: Path) -> None:
    def drawn() -> list[str]:
        settings = corpus_settings(sequences_per_step=19)
        corpus = open_corpus(settings, TOKENIZER)
        return [corpus.tokenizer.decode(sample.tokens) for sample in corpus.batches(settings, seed=0).next()]

    before = drawn()
    for index, path in enumerate(sorted(tmp_path.glob("doc*.txt"))):
        path.rename(tmp_path / f"{(7 * index) % 20:02}.txt")
    assert drawn() == before
