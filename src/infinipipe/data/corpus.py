"""Corpora: sources read, tokenized, cut to length and split into what is trained on and what is held out."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from infinipipe.data.batches import Batches, SampledBatches
from infinipipe.data.cache import VERSION, CacheBuilder, TokenCache, read_cache
from infinipipe.data.documents import DataError, Document, ReadCounts
from infinipipe.data.encode import encoder_spec
from infinipipe.data.files import written_folder
from infinipipe.data.parse import read_documents
from infinipipe.data.progress import Reading, Report
from infinipipe.data.sequences import Pieces, Sample, Sequences, fit_length, sequences_of
from infinipipe.data.settings import DataSettings, TokenizerSettings
from infinipipe.data.shards import Shard, read_chunks
from infinipipe.data.sources import document_patterns, find_shards, left_out
from infinipipe.data.stream import Stream, StreamedSource, read_sample
from infinipipe.data.tokenize import Task, workers_for
from infinipipe.data.tokenizer import beginning_of, fingerprint, largest_id, load_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_READING = (
    "format",
    "reader",
    "text_field",
    "prompt_field",
    "completion_field",
    "messages_field",
    "weight_field",
    "loss_on",
    "prompts_as_chats",
    "template_options",
    "on_undecodable",
    "on_bad_record",
)
"""Settings that decide what documents are read, and what of them is learnt."""


@dataclass(frozen=True)
class Corpus:
    """Training and held-out sequences with the tokenizer that made them.

    Attributes:
        train: what is trained on; of a stream, what was read of it so far.
        held_out: what is only evaluated; no text is in both.
        stream: what is trained on if it is streamed.
        tokenizer: the Hugging Face tokenizer.
        report: lines for the log: what was read, dropped and cut, what documents begin with, and whether a step repeats sequences.
        unigram_entropy: of the tokens that the documents have to learn, in nats per token.
        largest_id: the largest id that the tokenizer can give.
    """

    train: Sequences
    held_out: Sequences
    stream: Stream | None
    tokenizer: PreTrainedTokenizerBase
    report: tuple[str, ...]
    unigram_entropy: float
    largest_id: int

    def batches(self, settings: DataSettings, seed: int) -> Batches:
        """The global batches of a run. To be closed."""
        if self.stream is not None:
            return self.stream.batches(settings, seed)
        return SampledBatches(self.train, settings, seed)

    def require_ids_below(self, rows: int, samples: Iterable[Sample] | None = None) -> None:
        """Raise ``DataError``, naming document and token, if a token has no row in an embedding of so many ``rows``.

        Looks at ``samples``, or at all that is known, of which only what is of a source with such a token is read. A tokenizer with
        more entries than the embedding is fine otherwise, and common.
        """
        if self.largest_id < rows:
            return
        if samples is None:
            samples = itertools.chain(self.train.with_ids_from(rows), self.held_out.with_ids_from(rows))
        for sample in samples:
            beyond = sample.tokens[sample.tokens >= rows]
            if len(beyond):
                token = int(beyond[0])
                raise DataError(
                    f"{sample.name} has the token {self.tokenizer.convert_ids_to_tokens(token)!r} of id {token}, but the model's "
                    f"embedding has {rows} rows; leave the document out by data.exclude, or name the model's own tokenizer in "
                    "tokenizer.path"
                )


@dataclass(frozen=True)
class _Source:
    """A source with its settings and what it is read from."""

    name: str
    settings: DataSettings
    shards: list[Shard]

    @property
    def size(self) -> int:
        return sum(shard.size for shard in self.shards)


def open_corpus(data: DataSettings, tokenizer: TokenizerSettings, report: Report | None = None) -> Corpus:
    """Read, tokenize and split the corpus, from the cache where it has been done before.

    ``report`` is told how far that is. Raises ``DataError`` for whatever the settings do not tolerate.
    """
    sources = [_Source(name, settings, find_shards(settings)) for name, settings in data.of_sources().items()]
    loaded = load_tokenizer(
        tokenizer.path or _trained_tokenizer(sources, data, tokenizer, report), tokenizer.chat_template
    )
    tasks = [Task(encoder_spec(loaded, source.settings, tokenizer), source.settings) for source in sources]
    make = _stream if data.streaming else _tokenized
    caches = [make(source, task, loaded, tokenizer, report) for source, task in zip(sources, tasks, strict=True)]
    lines = [beginning_of(loaded, tokenizer).said]
    parts = []
    for source, cache in zip(sources, caches, strict=True):
        pieces, found = _usable(source, cache, tokenizer)
        parts.append(pieces)
        lines += [f"{source.name}: {line}" for line in found] if data.sources else found
    known = sequences_of(caches, parts, [source.name for source in sources], data.weights)
    lines += _unmatched(data, caches)
    is_held_out = known.are_below(data.held_out, one_at_least=not data.streaming)
    train, held_out = known.chosen(~is_held_out), known.chosen(is_held_out)
    _require_sequences(train, held_out, lines, data)
    counts = _shares(train, data)
    stream = None
    if data.streaming:
        streamed = [StreamedSource(s.name, s.shards, task) for s, task in zip(sources, tasks, strict=True)]
        stream = Stream(tuple(streamed), data.weights, data.held_out)
        lines.append(f"streaming: the figures are those of the first {len(known)} sequences")
    else:
        counts += _repeats(train.lengths, data)
    return Corpus(
        train=train,
        held_out=held_out,
        stream=stream,
        tokenizer=loaded,
        report=(*lines, *counts),
        unigram_entropy=unigram_entropy([cache.unigrams for cache in caches]),
        largest_id=largest_id(loaded),
    )


def unigram_entropy(counts: Sequence[NDArray[np.int64]]) -> float:
    """Entropy of the distribution of single tokens, in nats: the loss of a model that knows only frequencies."""
    total = np.sum(counts, axis=0)
    shares = total[total > 0] / total.sum()
    return float(-(shares * np.log(shares)).sum())


def _usable(source: _Source, cache: TokenCache, tokenizer: TokenizerSettings) -> tuple[Pieces, list[str]]:
    """The sequences of a source, and what was met and done there."""
    if not len(cache):
        raise _nothing_usable(source.settings, cache.counts)
    lines = [cache.counts.describe(source.settings, tokenizer)]
    pieces, fitted = fit_length(cache, source.settings)
    excluded = left_out(source.settings, cache)
    if excluded.any():
        pieces = pieces.chosen(~excluded[pieces.documents])
        fitted.append(f"{excluded.sum()} documents left out by data.exclude")
    return pieces, lines + fitted


def _nothing_usable(settings: DataSettings, counts: ReadCounts) -> DataError:
    named = "dataset" if settings.dataset else "files"
    return DataError(f"data.{named} holds no usable document: {counts.describe(settings)}")


def _unmatched(data: DataSettings, caches: Sequence[TokenCache]) -> list[str]:
    """A line for every pattern of a document that names none."""
    lines = []
    for path, number in document_patterns(data.exclude):
        alone = replace(data, exclude=[f"{path}:{number}"])
        if not data.streaming and not any(left_out(alone, cache).any() for cache in caches):
            lines.append(f"data.exclude names '{path}:{number}', but there is no such document")
    return lines


def _require_sequences(train: Sequences, held_out: Sequences, lines: Sequence[str], data: DataSettings) -> None:
    said = "; ".join(lines[1:])
    if not len(train):
        advice = "add other documents or set data.held_out to 0" if len(held_out) else "raise data.max_length"
        raise DataError(f"no document is left to train on: {said}; {advice}")
    for name, tokens in train.tokens_of_sources().items():
        if not tokens and data.weights is not None:
            raise DataError(
                f"no document is left to train on in the source {name}: {said}; add documents or leave it out"
            )


def _shares(train: Sequences, data: DataSettings) -> list[str]:
    """What every source has, and what share of training its weight makes it."""
    if len(train.names) == 1:
        return []
    lines, total = [], sum(data.weights or ())
    counts = np.bincount(train.sources, minlength=len(train.names))
    for index, (name, tokens) in enumerate(train.tokens_of_sources().items()):
        line = f"{name}: {counts[index]} sequences of {tokens} tokens to train on"
        if data.weights is not None:
            line += f", {data.weights[index] / total:.1%} of the tokens drawn"
        lines.append(line)
    return lines


def _repeats(lengths: NDArray[np.int64], settings: DataSettings) -> list[str]:
    """A line if a global batch is larger than all sequences of those ``lengths`` together."""
    limit = settings.tokens_per_step
    if settings.sequences_per_step <= len(lengths) or 0 < limit < lengths.sum() + lengths.min():
        return []
    return [
        f"data.sequences_per_step is {settings.sequences_per_step}, but there are only {len(lengths)} sequences to train on, "
        "so a step repeats sequences; lower it or add documents"
    ]


def _key(shards: Sequence[Shard], settings: DataSettings, *parts: object) -> str:
    reading = {name: getattr(settings, name) for name in _READING}
    content = repr((VERSION, [shard.stamp() for shard in shards], reading, parts))
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:20]


def _trained_tokenizer(
    sources: Sequence[_Source], data: DataSettings, settings: TokenizerSettings, report: Report | None
) -> Path:
    """The tokenizer that is trained on all documents of all sources; of streamed ones, on the first of each."""
    most = data.shuffle_window if data.streaming else None
    keys = [_key(source.shards, source.settings) for source in sources]
    name = hashlib.sha256(repr((keys, settings.vocab_size, most)).encode()).hexdigest()[:20]
    folder = Path(data.cache) / f"tokenizer-{name}"
    if not folder.is_dir():
        with Reading("training the tokenizer", sum(source.size for source in sources), report) as reading:
            train_tokenizer(_texts(sources, most, reading), folder, vocab_size=settings.vocab_size)
    return folder


def _texts(sources: Sequence[_Source], most: int | None, reading: Reading) -> Iterator[str]:
    """The texts of all documents, or of the first ``most`` of each source. Raises ``DataError`` if there is none."""
    before, counts = 0, ReadCounts()
    for source in sources:

        def step(documents: int, done: int, before: int = before) -> None:
            reading.step(documents, before + done)

        documents = read_documents(source.shards, source.settings, counts, step)
        for document in itertools.islice(documents, most):
            yield from _texts_of(document)
        before += source.size
    if not counts.documents:
        raise _nothing_usable(sources[0].settings, counts)


def _texts_of(document: Document) -> list[str]:
    if document.chat is not None:
        return [message["content"] for message in document.chat.messages if message.get("content")]
    if document.tokens is not None:
        raise DataError(
            f"{document.name} holds tokens, so no tokenizer can be trained on it; name the one that made it in tokenizer.path"
        )
    return [text for text in (document.prompt, document.text) if text]


def _tokenized(
    source: _Source,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    settings: TokenizerSettings,
    report: Report | None,
) -> TokenCache:
    """A source's tokens, from the cache or made now.

    A corpus of which nothing had to be cut is good for every policy; others are kept for each length at which they are cut.
    """
    key = _key(source.shards, source.settings, fingerprint(tokenizer), settings.bos, settings.special_tokens)
    whole = Path(source.settings.cache) / f"tokens-{key}"
    cut = whole.with_name(f"{whole.name}-{task.spec.cut_after}")
    for folder in (whole, cut):
        if folder.is_dir():
            return read_cache(folder)
    folder = cut if task.spec.cut_after else whole
    with written_folder(folder) as beside:
        counts = _write_cache(beside, source, task, report)
    if task.spec.cut_after and not counts.cut:
        with contextlib.suppress(OSError):  # another process has just done the same
            folder = folder.rename(whole)
    return read_cache(folder)


def _write_cache(folder: Path, source: _Source, task: Task, report: Report | None) -> ReadCounts:
    with (folder / "tokens.bin").open("wb") as file:
        builder = CacheBuilder(task.spec.dtype, task.spec.largest, file)
        builder.counts.files = len(source.shards)
        with Reading("tokenizing", source.size, report) as reading, workers_for(source.shards, task) as workers:
            for chunk in workers.map(read_chunks(source.shards)):
                builder.append(chunk)
                reading.step(len(chunk.lengths), chunk.bytes_done)
    if not len(builder):
        raise _nothing_usable(source.settings, builder.counts)
    builder.write_index(folder, [shard.name for shard in source.shards])
    return builder.counts


def _stream(
    source: _Source,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    settings: TokenizerSettings,
    report: Report | None,
) -> TokenCache:
    """The first documents of a source, in memory."""
    with Reading("tokenizing a sample", 0, report) as reading:
        return read_sample(StreamedSource(source.name, source.shards, task), reading)
