"""Settings of the corpus, its tokenizer and the global batches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from infinipipe.plan import PlanError
from infinipipe.plan.loading import load_function
from infinipipe.settings import SettingError, require_range

Format = Literal["auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "megatron"]
Policy = Literal["drop", "truncate", "split", "error"]
"""For documents that are too long."""
ONLY_SOURCE = "data"
"""Name of the source that ``data`` itself describes."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-9, 1e9
"""Weights of sources, and those of documents that are not 0, lie between."""
RESERVED = (
    "messages",
    "tools",
    "documents",
    "conversations",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
)
"""Variables of a chat template that come from the record and from how it is used."""


@dataclass(frozen=True)
class TokenizerSettings:
    """How text becomes tokens.

    Attributes:
        path: a Hugging Face tokenizer: a directory or a hub name; if empty, a byte-level BPE is trained on the corpus on the first run
        vocab_size: entries of the trained tokenizer
        bos: whether documents begin with the beginning-of-sequence token: auto does as the tokenizer itself does; chats begin as their template says, which always adds to
        special_tokens: what a special token that a document spells becomes: split takes it as ordinary text, parse as the token itself, error refuses the document
        chat_template: a file with a chat template in Jinja, in place of the tokenizer's own
    """

    path: str = ""
    vocab_size: int = 8192
    bos: Literal["auto", "always", "never"] = "auto"
    special_tokens: Literal["split", "parse", "error"] = "split"
    chat_template: str = ""

    def __post_init__(self) -> None:
        require_range("tokenizer.vocab_size", self.vocab_size, at_least=257)


@dataclass(frozen=True)
class SourceSettings:
    """One of several sources: what it is named in data.sources, with a weight. What is not given is as in data.

    Attributes:
        files: globs of the files to read
        dataset: a folder that datasets has saved, or a name on the hub, in place of files
        subset: of the hub's dataset
        split: of the dataset
        weight: share of the tokens of training, relative to the other sources' weights; without weights, all sources are one corpus
        format: how files are read
        reader: a function of one's own that reads them instead
        text_field: the field of a document's text
        prompt_field: the field of a prompt
        completion_field: the field of its completion
        messages_field: the field of a chat
        weight_field: the field of a document's weight in the loss
        loss_on: what is learnt of a chat
        prompts_as_chats: whether prompts and completions go through the chat template
    """

    files: list[str] = field(default_factory=list)
    dataset: str = ""
    subset: str = ""
    split: str = ""
    weight: float = 0.0
    format: Format | None = None
    reader: str | None = None
    text_field: str | None = None
    prompt_field: str | None = None
    completion_field: str | None = None
    messages_field: str | None = None
    weight_field: str | None = None
    loss_on: Literal["assistant", "last", "all"] | None = None
    prompts_as_chats: bool | None = None


@dataclass(frozen=True)
class DataSettings:
    """Which documents are trained on, and how they are read and batched.

    Attributes:
        files: globs of the files to read, ** reaching into folders; ~, environment variables and {stdlib}, the Python standard library's folder, are expanded
        exclude: patterns of file paths, or of documents as messages name them (path:number), to leave out; * matches any characters, / among them
        dataset: a folder that datasets has saved (save_to_disk), or a name on the hub, in place of files
        subset: of the hub's dataset
        split: of the dataset; train if not given
        sources: several sources in place of files, each a table data.sources.NAME with files or dataset, a weight, and what else differs
        format: auto goes by the suffix (jsonl, json, csv, tsv, parquet, arrow, feather, idx of Megatron; all else is text); .gz, .bz2, .xz and .zst before that are unpacked
        reader: a function of one's own, path/to/file.py:function, that yields the records of a file, in place of a format
        text_field: the field, or column, that holds a document's text
        prompt_field: the field of a prompt, which is read but not learnt, in records that have no text field
        completion_field: the field of the prompt's completion, which is learnt
        messages_field: the field of a chat, in records that have none of these; conversations is looked for too
        weight_field: the field of a document's weight in the loss, which is the weighted mean over the learnt tokens of a step; if empty, all weigh 1
        loss_on: what is learnt of a chat: every assistant turn, the last one, or all tokens
        prompts_as_chats: whether a prompt and its completion are a user's and an assistant's turn in the chat template, or plain text one after the other
        template_options: variables of the chat template, such as enable_thinking
        max_length: tokens of the longest sequence, the end-of-sequence token included
        on_too_long: what happens to longer ones; split cuts them into sequences of their own
        on_undecodable: what happens to a file, or a record, that is not UTF-8; replace puts U+FFFD in place of the bytes
        on_bad_record: what happens to a record that is malformed, lacks the fields or does not fit the chat template
        held_out: share of the documents kept for evaluation, chosen by a hash of their text
        sequences_per_step: sequences of a global batch
        tokens_per_step: if above 0, a global batch ends before it exceeds so many tokens, but has one sequence at least
        workers: processes that tokenize; 0 takes one for each CPU, and none for a small corpus
        streaming: tokenize while training, and keep nothing on disk
        shuffle_window: documents that are shuffled together while streaming
        cache: folder for tokenized corpora and trained tokenizers
    """

    files: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    dataset: str = ""
    subset: str = ""
    split: str = ""
    sources: dict[str, SourceSettings] = field(default_factory=dict)
    format: Format = "auto"
    reader: str = ""
    text_field: str = "text"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    messages_field: str = "messages"
    weight_field: str = ""
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    prompts_as_chats: bool = False
    template_options: dict[str, Any] = field(default_factory=dict)
    max_length: int = 16384
    on_too_long: Policy = "drop"
    on_undecodable: Literal["error", "drop", "replace"] = "error"
    on_bad_record: Literal["error", "drop"] = "error"
    held_out: float = 0.01
    sequences_per_step: int = 32
    tokens_per_step: int = 0
    workers: int = 0
    streaming: bool = False
    shuffle_window: int = 4096
    cache: str = "runs/cache"

    def __post_init__(self) -> None:
        given = [name for name in ("files", "dataset", "sources") if getattr(self, name)]
        if not given:
            raise SettingError("data.files is empty; name at least one file or glob, such as data/**/*.txt")
        if len(given) > 1:
            raise SettingError(
                f"data.{given[0]} and data.{given[1]} are both given; put all of them under data.sources"
            )
        if not self.dataset and not self.sources and (self.subset or self.split):
            raise SettingError("data.subset and data.split belong to a data.dataset, but there is none")
        _check_reader("data", self.reader, self.format, self.dataset)
        for name, source in self.sources.items():
            _check_source(name, source)
        if len({source.weight > 0 for source in self.sources.values()}) > 1:
            name = next(name for name, source in self.sources.items() if not source.weight)
            raise SettingError(f"data.sources.{name} has no weight, but others have; give all of them one, or none")
        if self.streaming and len(self.sources) > 1 and not self.weights:
            raise SettingError(
                "data.streaming needs a weight for each of several data.sources, whose sizes are unknown"
            )
        for name in RESERVED:
            if name in self.template_options:
                raise SettingError(
                    f"data.template_options must not hold {name}, which is none of the template's own variables"
                )
        if self.dataset and self.format != "auto":
            raise SettingError(f"data.format is {self.format}, which is for data.files; a data.dataset has its own")
        require_range("data.max_length", self.max_length, at_least=2)
        require_range("data.held_out", self.held_out, at_least=0, at_most=0.5)
        require_range("data.sequences_per_step", self.sequences_per_step, at_least=1)
        require_range("data.tokens_per_step", self.tokens_per_step, at_least=0)
        require_range("data.workers", self.workers, at_least=0)
        require_range("data.shuffle_window", self.shuffle_window, at_least=1)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Weights of the sources in order, if they have any."""
        weights = tuple(source.weight for source in self.sources.values())
        return weights if any(weights) else None

    def of_sources(self) -> dict[str, DataSettings]:
        """The settings of every source by its name, as if it were the only one."""
        if not self.sources:
            return {ONLY_SOURCE: self}
        return {name: self._with(source) for name, source in self.sources.items()}

    def _with(self, source: SourceSettings) -> DataSettings:
        own = {name: value for name, value in vars(source).items() if name != "weight" and value is not None}
        if source.dataset:
            own["format"] = "auto"
        return dataclasses.replace(self, sources={}, **own)


def _check_reader(section: str, reader: str | None, format: str | None, dataset: str) -> None:
    if not reader:
        return
    if dataset:
        raise SettingError(f"{section}.reader reads files, but {section} has a dataset; take one of them away")
    if format not in (None, "auto"):
        raise SettingError(
            f"{section}.format and {section}.reader are both given; a reader knows its files' format, so leave format out"
        )
    try:
        load_function(reader, "data reader")
    except PlanError as error:
        raise SettingError(f"{section}.reader: {error}") from None


def _check_source(name: str, source: SourceSettings) -> None:
    _check_reader(f"data.sources.{name}", source.reader, source.format, source.dataset)
    if bool(source.files) == bool(source.dataset):
        raise SettingError(f"data.sources.{name} needs either files or a dataset")
    if not source.dataset and (source.subset or source.split):
        raise SettingError(f"data.sources.{name} has a subset or a split, which belong to a dataset, but it has none")
    if source.dataset and source.format not in (None, "auto"):
        raise SettingError(f"data.sources.{name} has a format, which is for files; a dataset has its own")
    if source.weight:
        require_range(f"data.sources.{name}.weight", source.weight, at_least=LEAST_WEIGHT, at_most=MOST_WEIGHT)
