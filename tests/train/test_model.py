"""The model and the planner that settings describe, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig

from infinipipe.data import DataSettings, TokenizerSettings, open_corpus, train_tokenizer
from infinipipe.train.model import Vocabulary, model_config, open_model
from infinipipe.train.planning import StepPlanner
from infinipipe.train.settings import ModelSettings, ParallelSettings, PlanSettings, Settings, TrainSettings

FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def test_described_by_fields_alone() -> None:
    config = model_config(ModelSettings(config=FIELDS), vocab_size=300)
    assert (config.model_type, config.hidden_size, config.vocab_size) == ("llama", 32, 300)


def test_fields_replace_those_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"vocab_size": 320}))
    settings = ModelSettings(path=str(tmp_path), config={"num_hidden_layers": 2})
    config = model_config(settings, vocab_size=300)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (2, 32, 320)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_dropout": 0.1}, "model.config.hidden_dropout is no field of a llama configuration"),
        ({"attention_dropout": 0.1}, "dropout is not supported"),
        (
            {"vocab_size": 100},
            "model.config.vocab_size is 100, but the tokenizer's largest id is 299; make it at least 300",
        ),
        ({"hidden_size": "wide"}, "model.config cannot be used"),
        ({"num_attention_heads": 0}, "model.config cannot be used"),
        ({"model_type": "nonsense"}, "model.config cannot be used.*nonsense"),
    ],
)
def test_unusable_fields_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config(ModelSettings(config=FIELDS | changes), vocab_size=300)


def test_missing_path_and_other_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        model_config(ModelSettings(path=str(tmp_path / "nowhere")), vocab_size=300)
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    with pytest.raises(ValueError, match="holds a llama"):
        model_config(ModelSettings(path=str(tmp_path), config={"model_type": "qwen2"}), vocab_size=300)


def settings_of(
    *, config: dict[str, Any] | None = None, plan: dict[str, Any] | None = None, **parallel: Any
) -> Settings:
    return Settings(
        model=ModelSettings(config=FIELDS | (config or {})),
        data=DataSettings(files=["x"]),
        plan=PlanSettings(**plan or {}),
        parallel=ParallelSettings(**{"stages": 2} | parallel),
    )


def planner(settings: Settings, length: int = 200) -> StepPlanner:
    return StepPlanner(settings, model_config(settings.model, vocab_size=300), length)


def test_plans_keep_to_the_settings() -> None:
    plan = planner(settings_of(plan={"num_slices": 5, "recompute": "all"})).plan([500, 20, 30])
    assert max(pipeline.num_splits for pipeline in plan.replicas[0].pipelines) == 5
    assert {layers for row in plan.replicas[0].recompute for layers in row} == {2}
    capped = planner(settings_of(plan={"token_capacity": 64})).plan([500, 20, 30])
    assert max(chunk.num_tokens for chunk in capped.all_chunks()) <= 64


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"planner": "best"}, "there is no planner 'best'"),
        ({"schedule": "2f2b"}, "there is no schedule '2f2b'"),
        ({"memory_budget": 0.0001}, "needs about .* per device at stage"),
    ],
)
def test_impossible_plans_are_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planner(settings_of(plan=plan)).plan([500, 20, 30])


def test_stages_are_balanced_for_the_data_unless_the_settings_say() -> None:
    assert planner(settings_of()).cost.stage_layers == (2, 2)
    wide = {"vocab_size": 1500}
    assert planner(settings_of(config=wide)).cost.stage_layers == (3, 1)
    assert planner(settings_of(config=wide), length=50_000).cost.stage_layers == (2, 2)
    assert planner(settings_of(config=wide, stage_layers=[0, 4])).cost.stage_layers == (0, 4)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"stages": 5}, "parallel.stages is 5, but the model has 4 layers; use at most 4 stages"),
        (
            {"stage_layers": [1, 2]},
            r"parallel.stage_layers \[1, 2\] must name 2 counts that sum to the model's 4 layers",
        ),
        ({"stage_layers": [5, -1]}, r"parallel.stage_layers \[5, -1\] must name 2 counts"),
        ({"stage_layers": [1, 1, 2]}, r"parallel.stage_layers \[1, 1, 2\] must name 2 counts"),
    ],
)
def test_impossible_stages_are_named(parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planner(settings_of(**parallel))


QWEN3: dict[str, Any] = FIELDS | {
    "model_type": "qwen3",
    "head_dim": 16,
    "num_hidden_layers": 4,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GEMMA3: dict[str, Any] = FIELDS | {"model_type": "gemma3_text", "head_dim": 8}


def changed(folder: Path, file: dict[str, Any], changes: dict[str, Any]) -> PretrainedConfig:
    (folder / "config.json").write_text(json.dumps(file))
    return model_config(ModelSettings(path=str(folder), config=changes), vocab_size=300)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_parameters": YARN}, YARN | {"rope_theta": 1000000}),
        ({"rope_scaling": YARN}, YARN | {"rope_theta": 1000000}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e6}, None),
        ({"rope_theta": 5e6}, {"rope_type": "default", "rope_theta": 5e6}),
        ({"rope_parameters": {"rope_theta": 5e6}}, {"rope_type": "default", "rope_theta": 5e6}),
    ],
)
def test_rotary_changes_merge_in_any_spelling(
    changes: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e6}
    assert changed(tmp_path, QWEN3, changes).rope_parameters == (expected or linear)


def test_another_rotary_type_starts_without_the_old_ones_parameters(tmp_path: Path) -> None:
    file = QWEN3 | {"rope_scaling": YARN | {"beta_fast": 16.0}}
    same = changed(tmp_path, file, {"rope_parameters": {"factor": 8.0}}).rope_parameters
    assert same == YARN | {"beta_fast": 16.0, "factor": 8.0, "rope_theta": 1000000}
    other = changed(tmp_path, file, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}).rope_parameters
    assert other == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000000}
    none = changed(tmp_path, file, {"rope_scaling": None}).rope_parameters
    assert none == {"rope_type": "default", "rope_theta": 1000000}


def test_rotary_changes_of_a_family_with_two_kinds(tmp_path: Path) -> None:
    old = changed(
        tmp_path, GEMMA3, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 5e3}
    )
    new = changed(
        tmp_path,
        GEMMA3,
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 5e3},
            }
        },
    )
    assert old.rope_parameters == new.rope_parameters
    assert new.rope_parameters["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert new.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 5e3}
    with pytest.raises(ValueError, match="rope_parameters.factor is none of the layer types"):
        changed(tmp_path, GEMMA3, {"rope_parameters": {"factor": 8.0}})


def test_what_follows_from_other_fields_still_does(tmp_path: Path) -> None:
    fewer = changed(tmp_path, QWEN3, {"num_hidden_layers": 2})
    assert fewer.layer_types == ["full_attention"] * 2
    assert changed(tmp_path, FIELDS, {"num_attention_heads": 2}).head_dim == 16
    moe = {"model_type": "mixtral", "num_local_experts": 8}
    assert changed(tmp_path, FIELDS | moe, {"num_experts": 4}).num_local_experts == 4


def test_a_multi_modal_configuration_is_changed_in_its_language_part(tmp_path: Path) -> None:
    file = {"model_type": "gemma3", "tie_word_embeddings": False, "text_config": GEMMA3 | {"vocab_size": 310}}
    for changes in ({"num_hidden_layers": 2}, {"text_config": {"num_hidden_layers": 2}}):
        config = changed(tmp_path, file, changes)
        assert (config.model_type, config.num_hidden_layers, config.vocab_size) == ("gemma3_text", 2, 310)
        assert config.tie_word_embeddings is False


def test_the_report_says_what_is_changed_and_warns_of_long_sequences(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    settings = Settings(
        model=ModelSettings(path=str(tmp_path), config={"rope_parameters": YARN, "num_hidden_layers": 2}),
        data=DataSettings(files=["x"], max_length=65536),
    )
    first, second = open_model(settings).report
    assert first.startswith(f"model.config changes {tmp_path}: ")
    for change in ("rope_parameters.factor from none to 4.0", "rope_parameters.rope_type from default to yarn"):
        assert change in first
    assert "num_hidden_layers from 4 to 2" in first
    assert "rope_theta" not in first
    assert second.startswith(
        "warning: data.max_length is 65536, but the model's configuration is for sequences of up to 40960"
    )
    fits = Settings(model=ModelSettings(path=str(tmp_path)), data=DataSettings(files=["x"], max_length=40960))
    assert open_model(fits).report == ()


def test_a_new_model_has_the_tokenizers_special_tokens(tmp_path: Path) -> None:
    train_tokenizer(["some words"], tmp_path / "tokenizer", vocab_size=300)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.add_tokens(["<further>"])
    vocabulary = Vocabulary.of(tokenizer)
    assert vocabulary.size == tokenizer.convert_tokens_to_ids("<further>") + 1
    settings = Settings(model=ModelSettings(config=FIELDS), data=DataSettings(files=["x"]))
    config = open_model(settings, vocabulary).config
    assert (config.vocab_size, config.eos_token_id, config.bos_token_id) == (vocabulary.size, 0, None)
    own = Settings(model=ModelSettings(config=FIELDS | {"eos_token_id": 7}), data=DataSettings(files=["x"]))
    assert open_model(own, vocabulary).config.eos_token_id == 7


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("source", torch.float16), ("float32", torch.float32), ("bfloat16", torch.bfloat16)],
)
def test_weights_are_written_in_the_sources_dtype_unless_the_settings_say(
    chosen: Literal["source", "float32", "bfloat16"], expected: torch.dtype, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**FIELDS | {"vocab_size": 64}))
    model.to(torch.float16).save_pretrained(tmp_path)
    train, data = TrainSettings(export_dtype=chosen), DataSettings(files=["x"], max_length=99)
    loads = Settings(model=ModelSettings(path=str(tmp_path), weights="load"), data=data, train=train)
    assert open_model(loads).export_dtype == expected
    random = Settings(model=ModelSettings(path=str(tmp_path)), data=data, train=train)
    assert open_model(random).export_dtype == (torch.float32 if chosen == "source" else expected)


def test_a_tokenizer_may_have_more_entries_than_the_embedding(tmp_path: Path) -> None:
    """As long as the corpus has none of them: Gemma 3 1B is published so."""
    train_tokenizer(["some words"], tmp_path / "trained", vocab_size=300)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "trained")
    tokenizer.add_tokens(["<further>"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("some words")
    data = DataSettings(files=[f"{tmp_path}/*.txt"], cache=str(tmp_path / "cache"), held_out=0)
    corpus = open_corpus(data, TokenizerSettings(path=str(tmp_path / "tokenizer")))
    further = tokenizer.convert_tokens_to_ids("<further>")
    corpus.require_ids_below(further)
    (tmp_path / "other.txt").write_text("some <further> words")
    corpus = open_corpus(data, TokenizerSettings(path=str(tmp_path / "tokenizer")))
    corpus.require_ids_below(further + 1)
    with pytest.raises(ValueError, match=f"other.txt has the token '<further>' of id {further}"):
        corpus.require_ids_below(further)
