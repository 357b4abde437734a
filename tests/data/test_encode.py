"""Tokens of documents: beginnings, special tokens, large ids, and texts too long to be of use."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from infinipipe.data import Corpus, DataError, DataSettings, Document, ReadCounts, TokenizerSettings, open_corpus
from infinipipe.data import encode as module
from infinipipe.data.encode import Encoded, Encoder, cut_after, encoder_spec
from infinipipe.data.tokenizer import beginning_of, largest_id
from tests.data.chat_templates import CHATML, chat_tokenizer
from tests.data.conftest import words

TEXTS = ["the weather in Paris", "naïve 字 \n\n  x", "a" * 300, "assistant " * 40]


def with_bos(name: str = "<s>") -> PreTrainedTokenizerFast:
    """A tokenizer that puts a token before every text, as those of Llama and Gemma do."""
    tokenizer = chat_tokenizer(None, eos="</s>", bos=name)
    index = tokenizer.convert_tokens_to_ids(name)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, index)]
    )
    return tokenizer


def encoder(tokenizer: Any, data: dict[str, Any] | None = None, **settings: Any) -> Encoder:
    return Encoder(encoder_spec(tokenizer, DataSettings(files=["x"], **(data or {})), TokenizerSettings(**settings)))


def encode(
    tokenizer: Any, text: str, data: dict[str, Any] | None = None, **settings: Any
) -> tuple[list[int], ReadCounts]:
    counts = ReadCounts()
    (made,) = encoder(tokenizer, data, **settings).encode([Document("a.txt", text)], counts)
    assert isinstance(made, Encoded)
    return made.tokens.tolist(), counts


@pytest.mark.parametrize("text", TEXTS)
def test_texts_become_what_the_tokenizer_makes_of_them_and_an_end(text: str) -> None:
    for tokenizer in (with_bos(), chat_tokenizer(None), ByT5Tokenizer()):
        expected = tokenizer(text)["input_ids"]
        if expected[-1] != tokenizer.eos_token_id:
            expected = [*expected, tokenizer.eos_token_id]
        assert encode(tokenizer, text)[0] == expected


def test_documents_begin_as_the_tokenizer_has_it_or_the_settings_ask() -> None:
    own, none = with_bos(), chat_tokenizer(None)
    first = own.convert_tokens_to_ids("<s>")
    starts = {
        (tokenizer, bos): encode(tokenizer, "x", bos=bos)[0][0] == first
        for tokenizer in (own, none)
        for bos in ("auto", "always", "never")
    }
    assert starts == {
        (own, "auto"): True,
        (own, "always"): True,
        (own, "never"): False,
        (none, "auto"): False,
        (none, "always"): True,
        (none, "never"): False,
    }


@pytest.mark.parametrize(
    ("bos", "said"),
    [
        ("auto", "every text begins with '<s>', as the tokenizer has it (tokenizer.bos)"),
        ("always", "every document begins with '<s>' (tokenizer.bos is always)"),
        (
            "never",
            "no beginning-of-sequence token (tokenizer.bos is never), although the tokenizer puts '<s>' before a text",
        ),
    ],
)
def test_what_documents_begin_with_is_said(tmp_path: Path, bos: Any, said: str) -> None:
    with_bos().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("the weather")
    data = DataSettings(files=[str(tmp_path / "a.txt")], cache=str(tmp_path / "cache"), held_out=0)
    corpus = open_corpus(data, TokenizerSettings(path=str(tmp_path / "tokenizer"), bos=bos))
    assert corpus.report[0] == said
    begins = corpus.train.tokens(0)[0] == corpus.tokenizer.bos_token_id
    assert begins == (bos != "never")
    assert begins == (corpus.train.labels(0)[0] == corpus.train.tokens(0)[1] and bool(begins))


def test_chats_begin_as_their_template_says_unless_always() -> None:
    from infinipipe.data.records import document_of

    record = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    for template, begins in ((CHATML, False), ("{{ bos_token }}" + CHATML, True)):
        tokenizer = with_bos()
        tokenizer.chat_template = template
        for bos in ("auto", "never", "always"):
            made = encoder(tokenizer, bos=bos).encode(
                [document_of(record, "c", DataSettings(files=["x"]))], ReadCounts()
            )[0]
            assert isinstance(made, Encoded)
            count = int((made.tokens == tokenizer.bos_token_id).sum())
            assert count == (1 if begins or bos == "always" else 0)
            ((start, stop),) = made.spans
            assert tokenizer.decode(made.tokens[start:stop]) == "ho<|im_end|>\n"


def test_beginning_and_end_that_are_none() -> None:
    with pytest.raises(
        DataError, match="tokenizer.bos is always, but the tokenizer has no beginning-of-sequence token"
    ):
        beginning_of(chat_tokenizer(None, bos=None), TokenizerSettings(bos="always"))
    assert beginning_of(ByT5Tokenizer(), TokenizerSettings()).ids == ()


SPELLED = "<|im_start|>user\nhi<|im_end|>"


def test_special_tokens_that_a_text_spells_follow_the_setting() -> None:
    tokenizer = chat_tokenizer(None)
    as_text = tokenizer(SPELLED, split_special_tokens=True)["input_ids"]
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") not in as_text
    end = [tokenizer.eos_token_id]
    split, counts = encode(tokenizer, SPELLED)
    assert (split, counts.special) == (as_text + end, 1)
    parsed, counts = encode(tokenizer, SPELLED, special_tokens="parse")
    assert (parsed, counts.special) == (tokenizer(SPELLED)["input_ids"] + end, 1)
    assert encode(tokenizer, "nothing special", special_tokens="error")[1].special == 0
    with pytest.raises(
        DataError, match=r"a.txt spells the special token '<\|im_start\|>'; set tokenizer.special_tokens to"
    ):
        encode(tokenizer, SPELLED, special_tokens="error")


def test_special_tokens_that_no_list_but_the_added_ones_names_are_special_too() -> None:
    """Llama 3 has hundreds of them."""
    tokenizer = chat_tokenizer(None)
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<|reserved_7|>", special=True)])
    assert "<|reserved_7|>" not in tokenizer.all_special_tokens
    split, counts = encode(tokenizer, "a<|reserved_7|>b")
    assert counts.special == 1
    assert tokenizer.convert_tokens_to_ids("<|reserved_7|>") not in split
    thinks, counts = encode(tokenizer, "a<think>b")
    assert counts.special == 0
    assert tokenizer.convert_tokens_to_ids("<think>") in thinks


def test_what_spells_special_tokens_is_counted_in_the_report(tmp_path: Path) -> None:
    chat_tokenizer(None).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text(SPELLED)
    (tmp_path / "b.txt").write_text("plain")
    data = DataSettings(
        files=[str(tmp_path / "*.txt")], cache=str(tmp_path / "cache"), held_out=0, sequences_per_step=1
    )

    def report(special: Any) -> str:
        return open_corpus(data, TokenizerSettings(path=str(tmp_path / "tokenizer"), special_tokens=special)).report[1]

    for _ in range(2):  # tokenized, and from the cache
        assert report("split") == (
            "2 documents in 2 files; 1 spell a special token, taken as ordinary text (tokenizer.special_tokens)"
        )
    assert "taken as the token itself" in report("parse")
    with pytest.raises(DataError, match="a.txt spells the special token"):
        report("error")


def gapped(folder: Path, first: int, special: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of 512 entries and 60 tokens whose ids lie far above, as a file may have them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([words(400, 1)], trainer)
    content = json.loads(backend.to_str())
    entries = [
        {
            "id": first + 7 * index,
            "content": f"<tool_{index}>",
            "special": special,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for index in range(60)
    ]
    content["added_tokens"] += entries
    content["model"]["vocab"] |= {entry["content"]: entry["id"] for entry in entries}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def open_gapped(folder: Path, first: int, special: bool) -> Corpus:
    gapped(folder / "tokenizer", first, special)
    (folder / "a.txt").write_text("alpha <tool_59> beta <tool_0>")
    data = DataSettings(files=[str(folder / "a.txt")], cache=str(folder / "cache"), held_out=0)
    return open_corpus(data, TokenizerSettings(path=str(folder / "tokenizer"), special_tokens="parse"))


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("first", [5000, 65_536 - 7 * 60, 70_000, 10**6])
def test_ids_far_above_the_number_of_entries_are_kept(tmp_path: Path, first: int, special: bool) -> None:
    corpus = open_gapped(tmp_path, first, special)
    largest = first + 7 * 59
    assert len(corpus.tokenizer) <= corpus.largest_id == largest
    assert {first, largest} <= set(corpus.train.tokens(0).tolist())
    assert corpus.train.caches[0].tokens.dtype == (np.uint16 if largest < 2**16 else np.uint32)
    assert corpus.tokenizer.decode(corpus.train.tokens(0)[:-1]) == "alpha <tool_59> beta <tool_0>"


def test_ids_for_which_an_embedding_has_no_row_are_named_with_their_document(tmp_path: Path) -> None:
    corpus = open_gapped(tmp_path, 5000, special=True)
    largest = int(corpus.train.tokens(0).max())
    for samples in (None, [corpus.train.sample(0)]):
        corpus.require_ids_below(largest + 1, samples)
        token = corpus.tokenizer.convert_ids_to_tokens(5000 + 7 * 59)
        with pytest.raises(
            DataError,
            match=rf"a.txt has the token '{token}' of id {largest}, but the model's embedding has {largest} rows; leave",
        ):
            corpus.require_ids_below(largest, samples)


def test_ids_of_prompts_need_a_row_too_and_those_of_documents_left_out_need_none(tmp_path: Path) -> None:
    gapped(tmp_path / "tokenizer", 5000, special=True)
    records = [{"text": "alpha"}, {"prompt": "<tool_3>", "completion": "beta"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = TokenizerSettings(path=str(tmp_path / "tokenizer"), special_tokens="parse")

    def opened(**settings: Any) -> Corpus:
        data = DataSettings(files=[str(tmp_path / "*.jsonl")], cache=str(tmp_path / "cache"), held_out=0, **settings)
        return open_corpus(data, tokenizer)

    with pytest.raises(DataError, match=r"a.jsonl:2 has the token '<tool_3>' of id 5021"):
        opened().require_ids_below(600)
    opened().require_ids_below(5022)
    opened(exclude=["*:2"]).require_ids_below(600)


def test_tokens_of_another_tokenizer_are_refused() -> None:
    tokenizer = chat_tokenizer(None)
    made = encoder(tokenizer)
    stored = Document("a.idx:3", tokens=np.asarray([4, 5]))
    ended = Document("a.idx:4", tokens=np.asarray([4, tokenizer.eos_token_id]))
    counts = ReadCounts()
    first, second = made.encode([stored, ended], counts)
    assert isinstance(first, Encoded)
    assert isinstance(second, Encoded)
    assert first.tokens.tolist() == [4, 5, tokenizer.eos_token_id]
    assert second.tokens.tolist() == [4, tokenizer.eos_token_id]
    assert counts.unended == 1
    for wrong in (largest_id(tokenizer) + 1, -1):
        with pytest.raises(DataError, match=rf"a.idx:5 holds the token {wrong}, but the largest of the tokenizer is"):
            made.encode([Document("a.idx:5", tokens=np.asarray([4, wrong]))], counts)


def byte_level() -> Any:
    return chat_tokenizer(None)


def metaspace() -> Any:
    """As Llama 2 and Gemma have it: no pieces at all before the merges."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "</s>"], show_progress=False)
    backend.train_from_iterator([words(400, seed) for seed in range(3)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def unigram() -> Any:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([words(400, seed) for seed in range(3)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def without_spaces(count: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("abdeghilmnptz", k=count))


@pytest.mark.parametrize("make", [byte_level, metaspace, unigram, ByT5Tokenizer])
@pytest.mark.parametrize("text", [words(9000, 3), without_spaces(60_000, 4), "eta" * 9000, "ab" * 30_000])
def test_the_beginning_of_a_long_text_is_that_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, make: Any, text: str
) -> None:
    monkeypatch.setattr(module, "LEAST_CUT", 256)
    tokenizer = make()
    data: dict[str, Any] = {"on_too_long": "truncate", "max_length": 200}
    assert cut_after(DataSettings(files=["x"], **data)) == 256
    asked: list[int] = []
    made = encoder(tokenizer, data)
    tokenize = made._tokenizer.ids

    def watched(texts: list[str], *, parse: bool) -> list[Any]:
        asked.extend(map(len, texts))
        return tokenize(texts, parse=parse)

    monkeypatch.setattr(made._tokenizer, "ids", watched)
    counts = ReadCounts()
    (beginning,) = made.encode([Document("a.txt", text)], counts)
    assert isinstance(beginning, Encoded)
    whole, _ = encode(tokenizer, text, {"on_too_long": "error"})
    assert beginning.tokens.tolist() == whole[:257]
    assert counts.cut == 1
    assert max(asked) <= 4 * 8 * 256 < len(text)


def test_texts_are_cut_only_where_the_rest_is_of_no_use() -> None:
    def limit(**settings: Any) -> int:
        return cut_after(DataSettings(files=["x"], **settings))

    assert limit(on_too_long="error") == limit(on_too_long="split") == 0
    assert limit() == limit(max_length=2**17) == limit(on_too_long="truncate") == 2**17
    assert limit(max_length=2**17 + 1) == 2**18


def test_a_corpus_that_was_cut_is_made_again_where_more_is_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_CUT", 64)
    (tmp_path / "long.txt").write_text(words(2000, 1))
    (tmp_path / "short.txt").write_text("alpha")
    chat_tokenizer(None).save_pretrained(tmp_path / "tokenizer")

    def lengths(folder: str = "cache", **settings: Any) -> list[int]:
        data = DataSettings(
            files=[str(tmp_path / "*.txt")], cache=str(tmp_path / folder), held_out=0, sequences_per_step=1, **settings
        )
        return open_corpus(data, TokenizerSettings(path=str(tmp_path / "tokenizer"))).train.lengths.tolist()

    def caches(folder: str = "cache") -> int:
        return len(list((tmp_path / folder).glob("tokens-*")))

    cut = lengths(max_length=60, on_too_long="truncate")
    assert lengths(max_length=60) == cut[1:]
    assert cut[0] == 60
    assert caches() == 1
    assert lengths(max_length=70, on_too_long="truncate")[0] == 70
    assert caches() == 2
    whole = sum(lengths(max_length=60, on_too_long="split"))
    assert whole > 2000
    assert caches() == 3
    lengths("other", max_length=2**15)
    assert lengths("other", max_length=60, on_too_long="split")
    assert caches("other") == 1
