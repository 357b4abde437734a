"""What a corpus is made of, and what reading it met."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinipipe.data.settings import DataSettings, TokenizerSettings


class DataError(ValueError):
    """A corpus that cannot be read as the settings ask; the message names the file and what to change."""


class BadRecordError(ValueError):
    """A record that is no document; the message says what it is or lacks, to follow "the record"."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the chat template.

    Attributes:
        messages: in the form of transformers: dictionaries with a role and content.
        tools: JSON schemas of the functions that may be called, if there are any.
        options: variables of the template, from the record.
        learnable: for each message whether it may be learnt: those of an assistant that the record does not take out.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]
    learnable: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """One training example.

    Attributes:
        name: the file, with the record's number where it has several.
        text: what is learnt.
        prompt: before it, only read.
        weight: of its tokens in the loss.
        chat: in place of text and prompt.
        tokens: in place of them, of a corpus that is tokenized already.
    """

    name: str
    text: str = ""
    prompt: str = ""
    weight: float = 1.0
    chat: Chat | None = None
    tokens: NDArray[np.integer] | None = None

    @property
    def key(self) -> int:
        """A 64-bit hash of what it says, whatever it is named."""
        if self.tokens is not None:
            content = np.asarray(self.tokens, dtype="<i8").tobytes()
        elif self.chat is not None:
            said = [self.chat.messages, self.chat.tools, self.chat.options]
            content = json.dumps(said, sort_keys=True).encode()
        else:
            content = f"{self.prompt}\0{self.text}".encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


@dataclass
class ReadCounts:
    """What reading a corpus met.

    Attributes:
        files: files read.
        documents: documents kept.
        empty: documents without a character.
        empty_completions: records with a prompt whose completion is empty.
        undecodable: documents that are not UTF-8.
        bad_records: records that are no document.
        ambiguous: records that hold more than one of a text, a prompt with its completion and a chat.
        unlearnt: documents of which nothing is to be learnt, by their weights.
        special: documents that spell a special token.
        cut: documents so long that only their beginning was tokenized.
        inside: turns of chats that begin inside of a token.
        unused: chats whose messages have fields that the chat template does not name.
        unended: documents that were tokenized already and had no end-of-sequence token.
    """

    files: int = 0
    documents: int = 0
    empty: int = 0
    empty_completions: int = 0
    undecodable: int = 0
    bad_records: int = 0
    ambiguous: int = 0
    unlearnt: int = 0
    special: int = 0
    cut: int = 0
    inside: int = 0
    unused: int = 0
    unended: int = 0

    def add(self, other: ReadCounts) -> None:
        """Add what another reading met."""
        for name in vars(other):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def describe(self, settings: DataSettings, tokenizer: TokenizerSettings | None = None) -> str:
        """One sentence for the log."""
        did = {"drop": "dropped", "replace": "repaired", "error": "refused"}
        taken = {"split": "as ordinary text", "parse": "as the token itself", "error": "refused"}
        special = taken[(tokenizer or TokenizerSettings()).special_tokens]
        text = f"{self.documents} documents in {self.files} file{'s' * (self.files != 1)}"
        for count, what in (
            (self.empty, "empty, skipped"),
            (self.empty_completions, "with a prompt and an empty completion, skipped"),
            (self.undecodable, f"not UTF-8, {did[settings.on_undecodable]}"),
            (self.bad_records, f"malformed records, {did[settings.on_bad_record]}"),
            (
                self.ambiguous,
                "hold more than one of a text, a prompt with its completion and a chat, of which the first was taken; name "
                "another field in data.text_field or data.prompt_field to have the next",
            ),
            (self.unlearnt, "with nothing to learn by their weights, left out"),
            (self.special, f"spell a special token, taken {special} (tokenizer.special_tokens)"),
            (self.cut, "so long that only their beginning was tokenized"),
            (self.inside, "turns begin inside of a token, which is learnt with them"),
            (self.unused, "chats have fields of messages that the chat template does not name, left out"),
            (self.unended, "had no end-of-sequence token, added"),
        ):
            if count:
                text += f"; {count} {what}"
        return text
