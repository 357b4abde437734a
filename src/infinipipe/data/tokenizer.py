"""Tokenizers: a byte-level BPE trained on the corpus, or any Hugging Face tokenizer by path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinipipe.data.documents import DataError
from infinipipe.data.files import written_folder
from infinipipe.data.settings import TokenizerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], directory: Path, *, vocab_size: int) -> None:
    """Train a byte-level BPE of ``vocab_size`` entries on ``texts`` and save it in Hugging Face form.

    ``directory`` appears whole or not at all. Entry 0 is the end-of-sequence token ``<|endoftext|>``. A corpus too small
    for ``vocab_size`` merges gives fewer entries.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)
    with written_folder(directory) as beside:
        wrapped.save_pretrained(beside)


def load_tokenizer(path: str | Path, chat_template: str = "") -> PreTrainedTokenizerBase:
    """Load a Hugging Face tokenizer from a folder or the hub, with the chat template of a file if one is named.

    Raises ``DataError`` if there is none, or if it has no end-of-sequence token.
    """
    template = _read_template(chat_template) if chat_template else None
    tokenizer = _from_folder_or_hub(path)
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer {str(path)!r} has no end-of-sequence token (eos_token); sequences need one")
    tokenizer.model_max_length = 2**60
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _from_folder_or_hub(path: str | Path) -> PreTrainedTokenizerBase:
    """What is there, or was downloaded before, is asked for first: the hub is retried for a minute where there is no network."""
    from huggingface_hub import HfApi, constants
    from transformers import AutoTokenizer

    name, problem = str(path), ""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        problem = str(error).strip().partition("\n")[0]
    if Path(path).exists():
        raise DataError(f"tokenizer.path: no tokenizer can be loaded from {name!r}: {problem}")
    if constants.HF_HUB_OFFLINE:
        raise DataError(
            f"tokenizer.path: there is no folder {name!r}, and the hub was not asked for a tokenizer of that name, because "
            "HF_HUB_OFFLINE is set; name a folder, or unset it"
        )
    try:
        HfApi().model_info(name, timeout=10)
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # whatever the hub's client and its network layer raise
        problem = str(error).strip().partition("\n")[0]
    raise DataError(
        f"tokenizer.path: there is no folder {name!r}, and the hub, which was asked, gives no tokenizer of that name: {problem}"
    )


def _read_template(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(f"tokenizer.chat_template: cannot read {path!r}: {reason}") from None
    if not text.strip():
        raise DataError(f"tokenizer.chat_template: {path!r} is empty")
    return text


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that decides which tokens a text or a chat becomes."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    content = (
        backend.to_str() if backend is not None else repr((type(tokenizer), sorted(tokenizer.get_vocab().items())))
    )
    values = json.dumps([tokenizer.chat_template, tokenizer.special_tokens_map], sort_keys=True, default=str)
    return hashlib.sha256(f"{content}|{tokenizer.eos_token_id}|{tokenizer.bos_token_id}|{values}".encode()).hexdigest()


def largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest id that a text can become. Ids may have gaps, so that it can be above the number of entries."""
    return max(max(tokenizer.get_vocab().values()), *tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, 0)


@dataclass(frozen=True)
class Beginning:
    """What documents begin with.

    Attributes:
        ids: the tokens before every text.
        chats: whether a chat that does not begin with them gets them, too.
        said: how that came about, for the log.
    """

    ids: tuple[int, ...]
    chats: bool
    said: str


def beginning_of(tokenizer: PreTrainedTokenizerBase, settings: TokenizerSettings) -> Beginning:
    """What documents begin with by ``tokenizer.bos``. Raises ``DataError`` if there is no such token."""
    own = _added_before(tokenizer)
    named = " ".join(map(repr, tokenizer.convert_ids_to_tokens(list(own)))) if own else ""
    if settings.bos == "auto":
        if own:
            return Beginning(own, False, f"every text begins with {named}, as the tokenizer has it (tokenizer.bos)")
        return Beginning((), False, "no beginning-of-sequence token, as the tokenizer has it (tokenizer.bos)")
    if settings.bos == "always":
        if tokenizer.bos_token_id is None:
            raise DataError(
                "tokenizer.bos is always, but the tokenizer has no beginning-of-sequence token; set it to auto or never"
            )
        said = f"every document begins with {tokenizer.bos_token!r} (tokenizer.bos is always)"
        return Beginning((tokenizer.bos_token_id,), True, said)
    although = f", although the tokenizer puts {named} before a text" if own else ""
    return Beginning((), False, f"no beginning-of-sequence token (tokenizer.bos is never){although}")


def _added_before(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that the tokenizer itself puts before a text."""
    bare, whole = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start])
    return ()
