"""Tokenized corpora: written once to a cache, memory-mapped from then on."""

from __future__ import annotations

import hashlib
import itertools
import json
import zipfile
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from infinipipe.data.documents import DataError, Document, ReadCounts, find_files, read_documents
from infinipipe.data.files import written_folder
from infinipipe.data.settings import DataSettings, TokenizerSettings
from infinipipe.data.tokenizer import fingerprint, load_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 1
IGNORED = -100
DOCUMENTS_AT_ONCE = 64

Progress = Callable[[str, int, int], None]
"""``progress(what, bytes_done, bytes_total)``"""


@dataclass(frozen=True)
class TokenCache:
    """A tokenized corpus on disk.

    Attributes:
        tokens: all documents' tokens, one after another, memory-mapped.
        ends: where each document ends in ``tokens``.
        prompts: how many first tokens of each document are only read.
        keys: a 64-bit hash of each document's text.
        counts: what reading met.
        folder: where it lies.
    """

    tokens: NDArray[np.unsignedinteger]
    ends: NDArray[np.int64]
    prompts: NDArray[np.int64]
    keys: NDArray[np.uint64]
    counts: ReadCounts
    folder: Path

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    def name(self, document: int) -> str:
        """Where a document comes from."""
        with (self.folder / "names.txt").open(encoding="utf-8", errors="surrogateescape") as file:
            return json.loads(next(itertools.islice(file, document, None)))


@dataclass(frozen=True)
class Sequences:
    """Some documents of a corpus as training sequences of at most ``max_length`` tokens."""

    cache: TokenCache
    documents: NDArray[np.int64]
    max_length: int

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every sequence."""
        return np.minimum(self.cache.lengths[self.documents], self.max_length)

    def tokens(self, index: int) -> NDArray[np.int64]:
        """The tokens of one sequence, shape (length,)."""
        document = self.documents[index]
        start = self.cache.ends[document - 1] if document > 0 else 0
        stop = min(self.cache.ends[document], start + self.max_length)
        return self.cache.tokens[start:stop].astype(np.int64)

    def labels(self, index: int) -> NDArray[np.int64]:
        """What each token is to predict, shape (length,): the next token, or -100 where nothing is learnt.

        Nothing is learnt from the last token and from those whose next one belongs to the prompt.
        """
        labels = np.append(self.tokens(index)[1:], IGNORED)
        labels[: max(self.cache.prompts[self.documents[index]] - 1, 0)] = IGNORED
        return labels


@dataclass(frozen=True)
class Corpus:
    """Training and held-out sequences with the tokenizer that made them.

    Attributes:
        train: what is trained on.
        held_out: what is only evaluated; no text is in both.
        tokenizer: the Hugging Face tokenizer.
        report: lines for the log: what was read, dropped and cut, and whether a step repeats sequences.
        unigram_entropy: of the tokens of all sequences, in nats per token.
    """

    train: Sequences
    held_out: Sequences
    tokenizer: PreTrainedTokenizerBase
    report: tuple[str, ...]
    unigram_entropy: float


def open_corpus(data: DataSettings, tokenizer: TokenizerSettings, progress: Progress | None = None) -> Corpus:
    """Read, tokenize and split the corpus, from the cache where it has been done before.

    Raises ``DataError`` for whatever the settings do not tolerate.
    """
    files = find_files(data)
    loaded = load_tokenizer(tokenizer.path or _trained_tokenizer(files, data, tokenizer, progress))
    if tokenizer.add_bos and loaded.bos_token_id is None:
        raise DataError("tokenizer.add_bos is on, but the tokenizer has no beginning-of-sequence token; turn it off")
    cache = _token_cache(files, data, loaded, tokenizer.add_bos, progress)
    found = cache.counts.describe(data)
    documents, report = _fit_length(cache, data)
    train, held_out = _split(cache.keys[documents], data.held_out)
    sequences = [Sequences(cache, documents[part], data.max_length) for part in (train, held_out)]
    if not len(sequences[0]):
        advice = "add other documents or set data.held_out to 0" if len(documents) else "raise data.max_length"
        raise DataError(f"no document is left to train on: {'; '.join((found, *report))}; {advice}")
    report += _repeats(sequences[0].lengths, data)
    return Corpus(
        train=sequences[0],
        held_out=sequences[1],
        tokenizer=loaded,
        report=(found, *report),
        unigram_entropy=unigram_entropy(sequences),
    )


def unigram_entropy(parts: Sequence[Sequences]) -> float:
    """Entropy of the distribution of single tokens, in nats: the loss of a model that knows only frequencies."""
    counts = np.zeros(1, dtype=np.int64)
    for part in parts:
        for index in range(len(part)):
            found = np.bincount(part.tokens(index), minlength=len(counts))
            found[: len(counts)] += counts
            counts = found
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _fit_length(cache: TokenCache, settings: DataSettings) -> tuple[NDArray[np.int64], list[str]]:
    """Indices of the documents in use, and what the policy for those too long did."""
    lengths = cache.lengths
    too_long = lengths > settings.max_length
    documents = np.arange(len(lengths))
    if not too_long.any():
        return documents, []
    if settings.on_too_long == "error":
        first = int(np.argmax(too_long))
        raise DataError(
            f"{cache.name(first)} has {lengths[first]} tokens, data.max_length is {settings.max_length} ({too_long.sum()} "
            "such documents in all); raise it, or set data.on_too_long to drop or truncate"
        )
    share = too_long.sum() / len(lengths)
    line = f"{too_long.sum()} documents ({share:.1%}) above {settings.max_length} tokens, "
    if settings.on_too_long == "drop":
        return documents[~too_long], [line + "dropped"]
    only_prompt = cache.prompts >= settings.max_length
    if not only_prompt.any():
        return documents, [line + "truncated"]
    return documents[~only_prompt], [
        line + f"truncated; {only_prompt.sum()} of them lost all of their completion, dropped"
    ]


def _repeats(lengths: NDArray[np.int64], settings: DataSettings) -> list[str]:
    """A line if a global batch is larger than all sequences of those ``lengths`` together."""
    limit = settings.tokens_per_step
    if settings.sequences_per_step <= len(lengths) or 0 < limit < lengths.sum() + lengths.min():
        return []
    return [
        f"data.sequences_per_step is {settings.sequences_per_step}, but there are only {len(lengths)} sequences to train on, "
        "so a step repeats sequences; lower it or add documents"
    ]


def _split(keys: NDArray[np.uint64], share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices to train on and to hold out. Equal texts fall on one side, on every machine and whatever else is there."""
    if share == 0 or not len(keys):
        return np.arange(len(keys)), np.arange(0)
    border = max(int(share * 2**64), int(keys.min()) + 1)
    held_out = keys < np.uint64(min(border, 2**64 - 1))
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _files_hash(files: list[Path], *parts: object) -> str:
    stats = [(str(path.resolve()), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    return hashlib.sha256(repr((VERSION, stats, parts)).encode("utf-8", "surrogateescape")).hexdigest()[:20]


def _reading(settings: DataSettings) -> tuple[object, ...]:
    return (
        settings.format,
        settings.text_field,
        settings.prompt_field,
        settings.completion_field,
        settings.on_undecodable,
        settings.on_bad_record,
    )


def _trained_tokenizer(
    files: list[Path], data: DataSettings, settings: TokenizerSettings, progress: Progress | None
) -> Path:
    folder = Path(data.cache) / f"tokenizer-{_files_hash(files, _reading(data), settings.vocab_size)}"
    if not folder.is_dir():
        counts = ReadCounts()
        documents = read_documents(files, data, counts, _bytes_of(files, "training the tokenizer", progress))
        texts = (text for document in documents for text in (document.prompt, document.text) if text)
        train_tokenizer(texts, folder, vocab_size=settings.vocab_size)
    return folder


def _bytes_of(files: list[Path], what: str, progress: Progress | None) -> Callable[[int], None] | None:
    if progress is None:
        return None
    total = sum(path.stat().st_size for path in files)
    return lambda done: progress(what, done, total)


def _token_cache(
    files: list[Path],
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    add_bos: bool,
    progress: Progress | None,
) -> TokenCache:
    key = _files_hash(files, _reading(settings), fingerprint(tokenizer), add_bos)
    folder = Path(settings.cache) / f"tokens-{key}"
    if not folder.is_dir():
        with written_folder(folder) as beside:
            _write_cache(beside, files, settings, tokenizer, add_bos, progress)
    try:
        return _read_cache(folder)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"the tokenized corpus {folder} is damaged ({error}); delete it to have it made again"
        ) from None


def _read_cache(folder: Path) -> TokenCache:
    meta = json.loads((folder / "meta.json").read_text())
    index = np.load(folder / "index.npz")
    tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
    if len(tokens) != index["ends"][-1]:
        raise ValueError(f"tokens.bin has {len(tokens)} tokens instead of {index['ends'][-1]}")
    return TokenCache(
        tokens=tokens,
        ends=index["ends"],
        prompts=index["prompts"],
        keys=index["keys"],
        counts=ReadCounts(**meta["counts"]),
        folder=folder,
    )


def _write_cache(
    folder: Path,
    files: list[Path],
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    add_bos: bool,
    progress: Progress | None,
) -> None:
    counts = ReadCounts()
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    ends, prompts, keys = array("q"), array("q"), array("Q")
    documents = read_documents(files, settings, counts, _bytes_of(files, "tokenizing", progress))
    with (folder / "tokens.bin").open("wb") as tokens_file, (folder / "names.txt").open("w") as names_file:
        while group := list(itertools.islice(documents, DOCUMENTS_AT_ONCE)):
            for document, (tokens, prompt) in zip(group, _encode(group, tokenizer, add_bos), strict=True):
                tokens_file.write(np.asarray(tokens, dtype=dtype).tobytes())
                names_file.write(json.dumps(document.name) + "\n")
                ends.append((ends[-1] if ends else 0) + len(tokens))
                prompts.append(prompt)
                digest = hashlib.blake2b(f"{document.prompt}\0{document.text}".encode(), digest_size=8).digest()
                keys.append(int.from_bytes(digest, "big"))
    if not ends:
        raise DataError(f"data.files holds no usable document: {counts.describe(settings)}")
    np.savez(
        folder / "index.npz",
        ends=np.asarray(ends, dtype=np.int64),
        prompts=np.asarray(prompts, dtype=np.int64),
        keys=np.asarray(keys, dtype=np.uint64),
    )
    (folder / "meta.json").write_text(json.dumps({"dtype": dtype.name, "counts": asdict(counts)}) + "\n")


def _encode(
    documents: list[Document], tokenizer: PreTrainedTokenizerBase, add_bos: bool
) -> list[tuple[list[int], int]]:
    """Tokens of each document with the end-of-sequence token, and how many first ones are only read.

    A text that spells a special token is not taken for one.
    """

    def ids(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False)[
            "input_ids"
        ]

    start = [tokenizer.bos_token_id] if add_bos else []
    texts = ids([document.text for document in documents])
    has_prompt = [document.prompt for document in documents if document.prompt]
    prompts = iter(ids(has_prompt) if has_prompt else [])
    encoded = []
    for document, text in zip(documents, texts, strict=True):
        prompt = start + (next(prompts) if document.prompt else [])
        learnt_from = len(prompt) if document.prompt else 0
        encoded.append(([*prompt, *text, tokenizer.eos_token_id], learnt_from))
    return encoded
