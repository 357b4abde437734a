"""Settings of the corpus, its tokenizer and the global batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from infinipipe.settings import SettingError, require_range


@dataclass(frozen=True)
class TokenizerSettings:
    """How text becomes tokens.

    Attributes:
        path: a Hugging Face tokenizer: a directory or a hub name; if empty, a byte-level BPE is trained on the corpus on the first run
        vocab_size: entries of the trained tokenizer
        add_bos: put the tokenizer's beginning-of-sequence token before every sequence
    """

    path: str = ""
    vocab_size: int = 8192
    add_bos: bool = False

    def __post_init__(self) -> None:
        require_range("tokenizer.vocab_size", self.vocab_size, at_least=257)


@dataclass(frozen=True)
class DataSettings:
    """Which documents are trained on, and how they are read and batched.

    Attributes:
        files: globs of the files to read, ** reaching into folders; ~, environment variables and {stdlib}, the Python standard library's folder, are expanded
        exclude: patterns of file paths to leave out; * matches any characters, / among them
        format: text takes a file as one document, jsonl a line as one; auto takes .jsonl and .ndjson files as jsonl, all else as text
        text_field: the JSONL field that holds a document's text
        prompt_field: the JSONL field of a prompt, which is read but not learnt, in records that have no text field
        completion_field: the JSONL field of the prompt's completion, which is learnt
        max_length: tokens of the longest sequence, the end-of-sequence token included
        on_too_long: what happens to longer ones
        on_undecodable: what happens to a file, or a JSONL line, that is not UTF-8; replace puts U+FFFD in place of the bytes
        on_bad_record: what happens to a JSONL line that is not JSON or lacks the fields
        held_out: share of the documents kept for evaluation, chosen by a hash of their text
        sequences_per_step: sequences of a global batch
        tokens_per_step: if above 0, a global batch ends before it exceeds so many tokens, but has one sequence at least
        cache: folder for tokenized corpora and trained tokenizers
    """

    files: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    format: Literal["auto", "text", "jsonl"] = "auto"
    text_field: str = "text"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    max_length: int = 16384
    on_too_long: Literal["drop", "truncate", "error"] = "drop"
    on_undecodable: Literal["error", "drop", "replace"] = "error"
    on_bad_record: Literal["error", "drop"] = "error"
    held_out: float = 0.01
    sequences_per_step: int = 32
    tokens_per_step: int = 0
    cache: str = "runs/cache"

    def __post_init__(self) -> None:
        if not self.files:
            raise SettingError("data.files is empty; name at least one file or glob, such as data/**/*.txt")
        require_range("data.max_length", self.max_length, at_least=2)
        require_range("data.held_out", self.held_out, at_least=0, at_most=0.5)
        require_range("data.sequences_per_step", self.sequences_per_step, at_least=1)
        require_range("data.tokens_per_step", self.tokens_per_step, at_least=0)
