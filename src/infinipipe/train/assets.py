"""What goes along with a run's weights wherever they are written: tokenizer, generation settings, and what is known of the run.

All of it is kept in the run's folder from the start, so that any checkpoint can be exported at any time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import (
    ADDED_TOKENS_FILE,
    FULL_TOKENIZER_FILE,
    SPECIAL_TOKENS_MAP_FILE,
    TOKENIZER_CONFIG_FILE,
)
from transformers.utils import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_FILE, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, cached_file

from infinipipe.data.files import written_folder
from infinipipe.files import write_beside

ASSETS = "assets"
"""Folder of a run, beside its checkpoints, with the files that every export takes along."""
PROVENANCE = "provenance.json"
_TOKENIZER_FILES = (
    ADDED_TOKENS_FILE,
    FULL_TOKENIZER_FILE,
    SPECIAL_TOKENS_MAP_FILE,
    TOKENIZER_CONFIG_FILE,
    CHAT_TEMPLATE_FILE,
    LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
)
_MODEL_FILES = ("generation_config.json", "LICENSE*", "NOTICE*")
"""What is carried over from the folder of the model that a run started from."""
_NEW_CLASS, _OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"
"""A tokenizer without a family: its class's name since transformers 5, and the one that both versions know."""


@dataclass(frozen=True)
class Provenance:
    """What is known of a run's model besides its configuration.

    Attributes:
        source: name of the folder of the model that it started from; empty for random weights.
        dtype: what it is written in.
        longest: tokens of the longest sequence trained on.
        corpus: lines on the documents.
    """

    source: str
    dtype: str
    longest: int
    corpus: list[str]

    def save(self, run: Path) -> None:
        """Write it to a run's folder."""
        write_beside(run / PROVENANCE, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def load(cls, run: Path) -> Provenance | None:
        """What a run's folder has of it, if it has."""
        try:
            return cls(**json.loads((run / PROVENANCE).read_text()))
        except FileNotFoundError:
            return None


def keep_assets(run: Path, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
    """Keep, in the folder of a run, the tokenizer's files and those of the folder ``model`` that exports take along.

    Files are copied as they are. Only what was changed is written anew: a chat template, and the name of a class that older
    readers do not know. Raises ``WriteError``.
    """
    folder = run / ASSETS
    with written_folder(folder) as beside:
        if model and Path(model).is_dir():
            found = [path for pattern in _MODEL_FILES for path in Path(model).glob(pattern) if path.is_file()]
            for path in found:
                shutil.copy(path, beside)
        _write_tokenizer(beside, tokenizer)
        shutil.rmtree(folder, ignore_errors=True)


def _write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    files = list(_files_of(tokenizer))
    if not files:
        tokenizer.save_pretrained(folder)
    for path in files:
        shutil.copy(path, folder)
    templates = Path(tokenizer.name_or_path) / CHAT_TEMPLATE_DIR
    if templates.is_dir():
        shutil.copytree(templates, folder / CHAT_TEMPLATE_DIR)
    config = folder / TOKENIZER_CONFIG_FILE
    if config.is_file():
        fields: dict[str, Any] = json.loads(config.read_text())
        if fields.get("tokenizer_class") == _NEW_CLASS:
            config.write_text(json.dumps(fields | {"tokenizer_class": _OLD_CLASS}, indent=2, ensure_ascii=False) + "\n")
    template = tokenizer.chat_template
    if isinstance(template, str) and files and AutoTokenizer.from_pretrained(folder).chat_template != template:
        (folder / CHAT_TEMPLATE_FILE).write_text(template)


def _files_of(tokenizer: PreTrainedTokenizerBase) -> Iterator[Path]:
    """The files that a tokenizer was read from, in a folder or in the hub's cache."""
    for name in sorted({*_TOKENIZER_FILES, *type(tokenizer).vocab_files_names.values()}):
        found = cached_file(
            tokenizer.name_or_path,
            name,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None:
            yield Path(found)
