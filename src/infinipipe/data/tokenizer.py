"""Tokenizers: a byte-level BPE trained on the corpus, or any Hugging Face tokenizer by path."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinipipe.data.documents import DataError
from infinipipe.data.files import written_folder

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


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a Hugging Face tokenizer from a folder or the hub.

    Raises ``DataError`` if there is none, or if it has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().partition("\n")[0]
        raise DataError(f"tokenizer.path: no tokenizer can be loaded from {str(path)!r}: {first}") from None
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer {str(path)!r} has no end-of-sequence token (eos_token); sequences need one")
    tokenizer.model_max_length = 2**60
    return tokenizer


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that decides which tokens a text becomes."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    content = (
        backend.to_str() if backend is not None else repr((type(tokenizer), sorted(tokenizer.get_vocab().items())))
    )
    return hashlib.sha256(f"{content}|{tokenizer.eos_token_id}|{tokenizer.bos_token_id}".encode()).hexdigest()
