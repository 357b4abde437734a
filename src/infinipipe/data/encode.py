"""From documents to tokens with learnt spans. Imports no torch, and transformers only for chats and slow tokenizers."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from infinipipe.data.chats import ChatTemplate, RenderedChat
from infinipipe.data.documents import BadRecordError, DataError, Document, ReadCounts
from infinipipe.data.settings import DataSettings, TokenizerSettings
from infinipipe.data.tokenizer import beginning_of, largest_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST_CUT = 2**17
"""Fewest tokens of a document after which the rest is left alone where it is of no use: a power of two, so that most lengths share
a cache."""
CHARACTERS_PER_TOKEN = 8
"""With how many characters for each token of that number the beginning of a long text is tried first; then with four times as many."""
MARGIN = 64
"""The last tokens of a beginning are not taken as those of the whole text."""

Ids = NDArray[np.int64]
Spans = NDArray[np.int64]
"""Learnt spans of tokens, shape (spans, 2)."""


def cut_after(settings: DataSettings) -> int:
    """Tokens of a document after which the rest is of no use by the policy for long ones; 0 if all are of use."""
    if settings.on_too_long not in ("drop", "truncate"):
        return 0
    return max(LEAST_CUT, 1 << (settings.max_length - 1).bit_length())


@dataclass(frozen=True)
class EncoderSpec:
    """All that makes tokens of documents, to be sent to another process.

    Attributes:
        backend: the tokenizer as JSON of the library ``tokenizers``; empty if it is none of that kind.
        slow: the tokenizer itself then.
        before: tokens before every text.
        before_chats: whether they are put before chats that do not begin with them.
        end: the token after every text.
        largest: the largest id.
        special_ids: of special tokens.
        special_texts: what they look like.
        special: what a document becomes that spells one.
        chat_template: of the tokenizer, if it has any.
        template_values: what the template may use.
        loss_on: what is learnt of a chat.
        cut_after: see :func:`cut_after`.
    """

    backend: str
    slow: Any
    before: tuple[int, ...]
    before_chats: bool
    end: int
    largest: int
    special_ids: tuple[int, ...]
    special_texts: tuple[str, ...]
    special: Literal["split", "parse", "error"]
    chat_template: str | dict[str, str] | None
    template_values: dict[str, Any]
    loss_on: Literal["assistant", "last", "all"]
    cut_after: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The smallest type that holds every id."""
        return np.dtype(np.uint16 if self.largest < 2**16 else np.uint32)


def encoder_spec(tokenizer: PreTrainedTokenizerBase, settings: DataSettings, chosen: TokenizerSettings) -> EncoderSpec:
    """What makes tokens of documents as the settings ask."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    beginning = beginning_of(tokenizer, chosen)
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    special |= {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    _require_named(settings.template_options, tokenizer.chat_template)
    return EncoderSpec(
        backend="" if backend is None else backend.to_str(),
        slow=tokenizer if backend is None else None,
        before=beginning.ids,
        before_chats=beginning.chats,
        end=int(tokenizer.eos_token_id),
        largest=largest_id(tokenizer),
        special_ids=tuple(special),
        special_texts=tuple(special.values()),
        special=chosen.special_tokens,
        chat_template=tokenizer.chat_template,
        template_values={**tokenizer.special_tokens_map, **settings.template_options},
        loss_on=settings.loss_on,
        cut_after=cut_after(settings),
    )


def _require_named(options: Iterable[str], template: str | dict[str, str] | None) -> None:
    """Raise ``DataError`` for an option that the chat template does not name."""
    text = "\n".join(template.values()) if isinstance(template, dict) else template or ""
    for option in options:
        if not re.search(rf"\b{re.escape(option)}\b", text):
            raise DataError(
                f"data.template_options has {option!r}, but the tokenizer's chat template names no such variable; correct it or "
                "leave it out"
            )


@dataclass(frozen=True)
class Encoded:
    """A document's tokens, the end-of-sequence token included, and the spans of them that are learnt."""

    tokens: Ids
    spans: Spans


class Encoder:
    """Makes tokens of documents; what it meets is added to ``counts``."""

    def __init__(self, spec: EncoderSpec) -> None:
        self._spec = spec
        self._tokenizer = _Tokenizer(spec)
        self._is_special = np.zeros(spec.largest + 1, dtype=bool)
        self._is_special[list(spec.special_ids)] = True
        longest_first = sorted(spec.special_texts, key=len, reverse=True)
        self._spells = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._template: ChatTemplate | None = None
        if spec.chat_template:
            self._template = ChatTemplate(
                spec.chat_template,
                spec.template_values,
                loss_on=spec.loss_on,
                special=self._spells,
            )

    def encode(self, documents: Sequence[Document], counts: ReadCounts) -> list[Encoded | BadRecordError]:
        """The tokens of each document, or why a chat has none.

        Raises ``DataError`` for a document that spells a special token where that is an error, and for ids that the
        tokenizer does not have.
        """
        plain = [document for document in documents if document.chat is None and document.tokens is None]
        texts = iter(self._ids([document.text for document in plain], [document.name for document in plain], counts))
        prompted = [document for document in plain if document.prompt]
        prompts = iter(
            self._ids([document.prompt for document in prompted], [document.name for document in prompted], counts)
        )
        found: list[Encoded | BadRecordError] = []
        for document in documents:
            if document.tokens is not None:
                found.append(self._stored(document, counts))
            elif document.chat is not None:
                try:
                    found.append(self._chat(document, counts))
                except BadRecordError as error:
                    found.append(error)
            else:
                prompt = next(prompts) if document.prompt else None
                found.append(self._joined(prompt, next(texts), counts))
        return found

    def _joined(self, prompt: Ids | None, text: Ids, counts: ReadCounts) -> Encoded:
        before = np.asarray(self._spec.before, dtype=np.int64)
        parts = [before, *([] if prompt is None else [prompt])]
        start = sum(map(len, parts))
        tokens = np.concatenate([*parts, text, [self._spec.end]])
        limit = self._spec.cut_after
        if limit and len(tokens) > limit + 1 and max(len(text), start) > limit:
            counts.cut += 1
            tokens = tokens[: limit + 1]
        span = [[min(start, len(tokens)), len(tokens)]]
        return Encoded(tokens, np.asarray(span, dtype=np.int64))

    def _ids(self, texts: list[str], names: list[str], counts: ReadCounts) -> list[Ids]:
        """Ids of texts that are followed by nothing; of those too long to be of use, those of the beginning."""
        found = self._beginnings(texts, parse=True)
        for index, ids in enumerate(found):
            if not self._is_special[ids].any():
                continue
            (split,) = self._beginnings([texts[index]], parse=False)
            if np.array_equal(split, ids):
                continue
            self._met_special(names[index], texts[index], counts)
            if self._spec.special == "split":
                found[index] = split
        return found

    def _met_special(self, name: str, text: str, counts: ReadCounts) -> None:
        counts.special += 1
        if self._spec.special == "error":
            match = self._spells.search(text)
            raise DataError(
                f"{name} spells the special token {match[0] if match else '?'!r}; set tokenizer.special_tokens to split or "
                "parse, or leave it out with data.exclude"
            )

    def _beginnings(self, texts: list[str], *, parse: bool) -> list[Ids]:
        limit = self._spec.cut_after
        characters = CHARACTERS_PER_TOKEN * limit
        if not limit or all(len(text) <= characters for text in texts):
            return self._tokenizer.ids(texts, parse=parse)
        found = []
        for text in texts:
            size = characters
            while size < len(text):
                (ids,) = self._tokenizer.ids([text[:size]], parse=parse)
                if len(ids) > limit + MARGIN:
                    found.append(ids[: limit + 1])
                    break
                size *= 4
            else:
                found += self._tokenizer.ids([text], parse=parse)
        return found

    def _stored(self, document: Document, counts: ReadCounts) -> Encoded:
        """Tokens that were there already, with an end."""
        tokens = np.asarray(document.tokens, dtype=np.int64)
        outside = (tokens < 0) | (tokens > self._spec.largest)
        if outside.any():
            raise DataError(
                f"{document.name} holds the token {tokens[np.argmax(outside)]}, but the largest of the tokenizer is "
                f"{self._spec.largest}; name the tokenizer by which the file was made in tokenizer.path"
            )
        if tokens[-1] != self._spec.end:
            counts.unended += 1
            tokens = np.append(tokens, self._spec.end)
        return Encoded(tokens, np.asarray([[0, len(tokens)]], dtype=np.int64))

    def _chat(self, document: Document, counts: ReadCounts) -> Encoded:
        if self._template is None:
            raise DataError(
                f"{document.name} is a chat, but the tokenizer has no chat template; name one in tokenizer.chat_template"
            )
        assert document.chat is not None
        rendered = self._template.render(document.chat)
        counts.unused += rendered.has_unused_fields
        if rendered.spelled:
            start, end = rendered.spelled[0]
            self._met_special(document.name, rendered.text[start:end], counts)
            if self._spec.special == "parse":
                rendered = dataclasses.replace(rendered, spelled=())
        ids, starts, ends = self._pieces(rendered)
        spans = []
        for start, end in rendered.learnt:
            first, last = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(starts, end, "left"))
            if first < last:
                spans.append((first, last))
                counts.inside += bool(starts[first] < start)
        added = len(self._spec.before) if self._spec.before_chats and tuple(ids[:1]) != self._spec.before else 0
        tokens = np.concatenate([np.asarray(self._spec.before[:added], dtype=np.int64), ids])
        learnt = np.asarray(spans, dtype=np.int64).reshape(-1, 2) + added
        limit = self._spec.cut_after
        if limit and len(tokens) > limit + 1:
            counts.cut += 1
            tokens, learnt = tokens[: limit + 1], np.minimum(learnt, limit + 1)
            learnt = learnt[learnt[:, 0] < learnt[:, 1]]
        return Encoded(tokens, learnt)

    def _pieces(self, rendered: RenderedChat) -> tuple[Ids, Ids, Ids]:
        """Ids of a chat with the first and last character of each; what only spells a special token is ordinary text."""
        borders = sorted({0, len(rendered.text), *(border for span in rendered.spelled for border in span)})
        spelled = {start for start, _ in rendered.spelled}
        parts = []
        for start, end in itertools.pairwise(borders):
            piece = rendered.text[start:end]
            ids, starts, ends = self._tokenizer.placed(piece, parse=start not in spelled, follows=start > 0)
            parts.append((ids, starts + start, ends + start))
        if not parts:
            raise BadRecordError("becomes an empty text by the chat template")
        ids, starts, ends = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return ids, starts, ends


class _Tokenizer:
    """Ids of texts, with special tokens taken for themselves (``parse``) or for ordinary text."""

    def __init__(self, spec: EncoderSpec) -> None:
        self._slow = spec.slow
        self._largest = spec.largest
        self._fast: Any = None
        if spec.backend:
            from tokenizers import Tokenizer

            self._fast = Tokenizer.from_str(spec.backend)
            self._fast.no_truncation()
            self._fast.no_padding()

    def ids(self, texts: list[str], *, parse: bool) -> list[Ids]:
        """Ids of every text."""
        if not texts:
            return []
        if self._fast is None:
            found = self._slow(
                texts, add_special_tokens=False, split_special_tokens=not parse, return_attention_mask=False
            )["input_ids"]
        else:
            self._fast.encode_special_tokens = not parse
            found = [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=False)]
        return [np.asarray(ids, dtype=np.int64) for ids in found]

    def placed(self, text: str, *, parse: bool, follows: bool) -> tuple[Ids, Ids, Ids]:
        """Ids of a text that ``follows`` another or not, with the first and the last character, exclusive, of each."""
        if self._fast is None:
            raise DataError(
                "chats need a tokenizer of the library tokenizers, which tells where tokens stand; this one does not"
            )
        self._fast.encode_special_tokens = not parse
        newline, offset = [], 0
        if follows:
            # A tokenizer may put a space before all that it is given; behind a line break it does not.
            (only,) = self._fast.encode_batch(["\n"], add_special_tokens=False)
            (both,) = self._fast.encode_batch(["\n" + text], add_special_tokens=False)
            if both.ids[: len(only.ids)] == only.ids:
                newline, offset = only.ids, 1
                encoding = both
        if not offset:
            (encoding,) = self._fast.encode_batch([text], add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype=np.int64)[len(newline) :]
        places = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)[len(newline) :] - offset
        return ids, places[:, 0], places[:, 1]
