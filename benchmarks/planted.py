"""Faults planted in checkpoints, configurations and settings, and whether loading them says so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from infinipipe.data import Corpus, DataSettings, TokenizerSettings, open_corpus, train_tokenizer
from infinipipe.model import build_stage
from infinipipe.model.shards import INDEX, SINGLE, shard_name
from infinipipe.train.model import open_checkpoint, open_model
from infinipipe.train.settings import ModelSettings, Settings

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
Tensors = dict[str, Tensor]
Changes = Mapping[str, Any]


class Outcome(Enum):
    REFUSED = "refused in one sentence that names it"
    SAID = "said in the log"
    SILENT = "passed unnoticed"


@dataclass(frozen=True)
class Fault:
    """Something wrong with a sound checkpoint.

    Attributes:
        words: what must be said, a regular expression.
        tensors: changes them before they are written.
        folder: changes the folder after they are, or what the settings say of model and data.
        experts: whether it is a checkpoint with experts.
        tied: whether its configuration ties embedding and head.
    """

    words: str
    tensors: Callable[[Tensors], Any] = lambda tensors: None
    folder: Callable[[Path], Changes | None] = lambda folder: None
    experts: bool = False
    tied: bool = False

    def plant(self, folder: Path) -> Outcome:
        """Write the checkpoint with its fault, and load it on two stages."""
        source = folder / "source"
        config = Qwen3MoeConfig(**_SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
        plain = config if self.experts else LlamaConfig(**_SIZES, tie_word_embeddings=self.tied)
        AutoModelForCausalLM.from_config(plain).save_pretrained(source)
        tensors = load_file(source / SINGLE)
        self.tensors(tensors)
        save_file(tensors, source / SINGLE, metadata={"format": "pt"})
        changes = self.folder(source) or {}
        settings = Settings(
            model=ModelSettings(path=str(source), weights="load", **changes.get("model", {})),
            data=DataSettings(files=["unused"], **changes.get("data", {"max_length": 256})),
        )
        try:
            said = _load(settings, changes.get("corpus"))
        except ValueError as error:
            one_line = "\n" not in str(error)
            return Outcome.REFUSED if one_line and re.search(self.words, str(error)) else Outcome.SILENT
        return Outcome.SAID if any(re.search(self.words, line) for line in said) else Outcome.SILENT


def _load(settings: Settings, corpus: Corpus | None) -> tuple[str, ...]:
    model = open_model(settings)
    if corpus is not None:
        corpus.require_ids_below(model.config.vocab_size)
    for stage in range(2):
        build_stage(model.config, (1, 1), stage, checkpoint=open_checkpoint(settings.model, model.config))
    return model.report


_UP = "model.layers.0.mlp.up_proj.weight"
_EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


def _replace(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name])

    return apply


def _spoilt(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[3] = value
        return changed

    return change


def _rename(old: str, new: str) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return apply


def _shard(folder: Path) -> None:
    """Two shards and an index in place of the single file."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    parts = {shard_name(0, 2): names[::2], shard_name(1, 2): names[1::2]}
    for file, chosen in parts.items():
        save_file({name: tensors[name] for name in chosen}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / SINGLE).unlink()


def _without_a_shard(folder: Path) -> None:
    _shard(folder)
    (folder / shard_name(1, 2)).unlink()


def _with_another_shard(folder: Path) -> None:
    _shard(folder)
    save_file({"x": torch.ones(1)}, folder / shard_name(2, 3))


def _with_both(folder: Path) -> None:
    single = (folder / SINGLE).read_bytes()
    _shard(folder)
    (folder / SINGLE).write_bytes(single)


def _with_a_stale_index(folder: Path) -> None:
    _shard(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.bias"] = shard_name(0, 2)
    (folder / INDEX).write_text(json.dumps(index))


def _with_an_unlisted_tensor(folder: Path) -> None:
    _shard(folder)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][_UP]
    (folder / INDEX).write_text(json.dumps(index))


def _cut_short(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[: len(content) // 2])


def _configured(**fields: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return apply


def _settings(**changes: Any) -> Callable[[Path], Changes]:
    return lambda folder: changes


def _to_fp8(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float8_e4m3fn)


def _fp8_with_scales_of_another_shape(tensors: Tensors) -> None:
    tensors[_UP] = _to_fp8(tensors[_UP])
    tensors[f"{_UP}_scale_inv"] = torch.ones(3, 3)


def _corpus_beyond(folder: Path) -> Changes:
    """A text with an added token whose id lies beyond the embedding."""
    from transformers import AutoTokenizer

    place = folder.parent
    train_tokenizer(["plain words " * 9], place / "trained", vocab_size=280)
    tokenizer = AutoTokenizer.from_pretrained(place / "trained")
    tokenizer.add_tokens([f"<extra{number}>" for number in range(60)])
    tokenizer.save_pretrained(place / "tokenizer")
    (place / "fine.txt").write_text("plain words")
    (place / "beyond.txt").write_text("plain <extra59> words")
    data = DataSettings(files=[f"{place}/*.txt"], cache=str(place / "cache"), held_out=0, max_length=256)
    corpus = open_corpus(data, TokenizerSettings(path=str(place / "tokenizer")))
    assert max(int(np.max(corpus.train.tokens(i))) for i in range(2)) >= _SIZES["vocab_size"]
    return {"corpus": corpus}


FAULTS: Mapping[str, Fault] = {
    "a tensor is missing": Fault(f"no tensor '{_UP}'", lambda tensors: tensors.pop(_UP)),
    "a tensor that the model has no place for": Fault(
        "holds 1 tensor that the model has no place for, model.layers.0.mlp.gate_bias",
        lambda tensors: tensors.update({"model.layers.0.mlp.gate_bias": torch.ones(3)}),
    ),
    "a tensor under another name": Fault("no place for.*w_up", _rename(_UP, "model.layers.0.mlp.w_up.weight")),
    "a tensor of another shape": Fault(
        r"up_proj.weight has shape \(23, 16\)", _replace(_UP, lambda t: t[1:].contiguous())
    ),
    "two tensors for one parameter": Fault(
        "are both", lambda tensors: tensors.update({"norm.weight": tensors["model.norm.weight"] + 1})
    ),
    "NaN in a weight": Fault(f"{_UP} holds values that are not finite", _replace(_UP, _spoilt(float("nan")))),
    "infinity in a weight": Fault(f"{_UP} holds values that are not finite", _replace(_UP, _spoilt(float("inf")))),
    "a file cut short": Fault("cut short", folder=_cut_short),
    "a shard is missing": Fault("names model-00002-of-00002.safetensors, which is not there", folder=_without_a_shard),
    "a shard too many": Fault("has model-00003-of-00003.safetensors, which", folder=_with_another_shard),
    "a single file beside an index": Fault("has both model.safetensors and", folder=_with_both),
    "an index that names a tensor that its file lacks": Fault(
        "model.norm.bias, which it does not", folder=_with_a_stale_index
    ),
    "a tensor that the index does not name": Fault(f"{_UP}, which .* does not name", folder=_with_an_unlisted_tensor),
    "an expert is missing": Fault(
        "lacks number 2 of the tensors such as", lambda tensors: tensors.pop(_EXPERT.format(2)), experts=True
    ),
    "the last expert is missing": Fault(
        "cannot become|has shape",
        lambda tensors: [tensors.pop(_EXPERT.format(3).replace("up_proj", part)) for part in ("up_proj", "gate_proj")],
        experts=True,
    ),
    "fp8 weights without scales": Fault("float8_e4m3fn without scales", _replace(_UP, _to_fp8)),
    "fp8 weights with scales of another shape": Fault(
        "its scales are of shape",
        _fp8_with_scales_of_another_shape,
        _configured(quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]}),
    ),
    "4-bit weights": Fault(
        "quantised by bitsandbytes", folder=_configured(quantization_config={"quant_method": "bitsandbytes"})
    ),
    "whole numbers where weights belong": Fault("stored as int8", _replace(_UP, lambda t: t.to(torch.int8))),
    "a head of its own, though the configuration ties it": Fault(
        "warning: .*lm_head.weight, which differs",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 0.1}),
        tied=True,
    ),
    "the same, and the settings tie it": Fault(
        "set model.config.tie_word_embeddings to false",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 0.1}),
        _settings(model={"config": {"tie_word_embeddings": True}}),
        tied=True,
    ),
    "a head that the settings untie, but that is not there": Fault(
        "no tensor 'lm_head.weight'.* leave model.config.tie_word_embeddings true",
        folder=_settings(model={"config": {"tie_word_embeddings": False}}),
        tied=True,
    ),
    "a configuration with more layers": Fault("no tensor 'model.layers.2", folder=_configured(num_hidden_layers=3)),
    "a configuration with fewer layers": Fault("no place for", folder=_configured(num_hidden_layers=1)),
    "a rotary parameter with a typo": Fault(
        "rope_parameters.fcator is no", folder=_settings(model={"config": {"rope_parameters": {"fcator": 4.0}}})
    ),
    "a rotary type with a typo": Fault(
        "rope_type is 'yarm'", folder=_settings(model={"config": {"rope_parameters": {"rope_type": "yarm"}}})
    ),
    "a rotary type without what it needs": Fault(
        "factor", folder=_settings(model={"config": {"rope_scaling": {"type": "yarn"}}})
    ),
    "a field that there is none of": Fault(
        "hidden_sise is no", folder=_settings(model={"config": {"hidden_sise": 16}})
    ),
    "a dtype in the configuration": Fault(
        "dtype decides nothing", folder=_settings(model={"config": {"torch_dtype": "x"}})
    ),
    "a pattern of tensors that matches none": Fault(
        "has no such tensor", folder=_settings(model={"ignore": ["vision*"]})
    ),
    "sequences beyond the configuration's positions": Fault("warning: data.max_length is", folder=_settings(data={})),
    "a token beyond the embedding": Fault("beyond.txt.* has the token '<extra59>'", folder=_corpus_beyond),
}
"""Faults by what is wrong."""
