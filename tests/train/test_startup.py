"""What a run refuses before it reads anything, and what it plans before its first step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from infinipipe.cost import flop_cost, save_cost
from infinipipe.data import Corpus, open_corpus
from infinipipe.data.settings import DataSettings, TokenizerSettings
from infinipipe.plan import PlanError
from infinipipe.runtime.footprint import footprint
from infinipipe.train.planning import StepPlanner
from infinipipe.train.settings import ModelSettings, ParallelSettings, PlanSettings, Settings
from infinipipe.train.startup import check_start, check_worst, worst_batch
from tests.train.conftest import train, write_corpus

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


def settings(**parts: Any) -> Settings:
    """Settings of a small model, whose corpus does not exist: nothing here may look for it."""
    usual: dict[str, Any] = {
        "model": ModelSettings(config={"model_type": "llama", **SIZES}),
        "data": DataSettings(files=["nowhere/*.txt"]),
        "tokenizer": TokenizerSettings(vocab_size=300),
    }
    return Settings(**usual | parts)


def model(**fields: Any) -> ModelSettings:
    return ModelSettings(config={"model_type": "llama", **SIZES, **fields})


def test_a_good_start_is_the_model() -> None:
    assert check_start(settings()).config.vocab_size == 300


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": model(hiden_size=64)}, "hiden_size is no field of a llama configuration"),
        (
            {"model": model(vocab_size=299)},
            "vocab_size is 299, but the tokenizer's largest id is 299; make it at least 300",
        ),
        ({"model": model(num_hidden_layers=0)}, "num_hidden_layers is 0; it must be a whole number of at least 1"),
        ({"model": model(attention_dropout=0.1)}, "dropout is not supported"),
        ({"model": ModelSettings(config={"model_type": "lama"})}, "lama"),
        ({"parallel": ParallelSettings(stages=4)}, "parallel.stages is 4, but the model has 3 layers"),
        (
            {"parallel": ParallelSettings(stages=2, stage_layers=[2, 2])},
            "must name 2 counts that sum to the model's 3 layers",
        ),
        ({"plan": PlanSettings(cost="nowhere.json")}, "cannot read the cost file nowhere.json"),
        ({"tokenizer": TokenizerSettings(path="nowhere/tokenizer")}, "nowhere/tokenizer"),
        ({"model": ModelSettings(path="nowhere/model", weights="load")}, "nowhere/model"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_read(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        check_start(settings(**parts))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cost_file_of_another_model_is_refused(tmp_path: Path) -> None:
    other = footprint(LlamaConfig(**SIZES | {"hidden_size": 64}), torch.float32)
    save_cost(flop_cost(other.shape, (2, 1), element_bytes=4, layers=other.layers), tmp_path / "cost.json")
    given = settings(parallel=ParallelSettings(stages=2), plan=PlanSettings(cost=str(tmp_path / "cost.json")))
    with pytest.raises(ValueError, match="describes a model whose hidden is 64, but that of the run is 32"):
        check_start(given)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    given = settings(model=ModelSettings(path=str(tmp_path), weights="load"))
    assert check_start(given).config.hidden_size == 32
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="model.safetensors"):
        check_start(given)
    weights.unlink()
    with pytest.raises(ValueError, match="safetensors"):
        check_start(given)


def test_the_worst_batch_is_the_longest_that_a_step_can_draw() -> None:
    lengths = [90, 50, 40, 30, 5]
    assert worst_batch(lengths, DataSettings(files=["x"], sequences_per_step=3)) == [90, 50, 40]
    assert worst_batch(lengths, DataSettings(files=["x"], sequences_per_step=9, tokens_per_step=150)) == [90, 50]
    assert worst_batch(lengths, DataSettings(files=["x"], tokens_per_step=10)) == [90]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, DataSettings]:
    folder = tmp_path_factory.mktemp("startup")
    write_corpus(folder)
    data = DataSettings(files=[f"{folder}/corpus/*.txt"], cache=f"{folder}/cache", sequences_per_step=4)
    return open_corpus(data, TokenizerSettings(vocab_size=300)), data


def planner_of(**plan: Any) -> StepPlanner:
    given = settings(plan=PlanSettings(**plan), parallel=ParallelSettings(stages=2))
    return StepPlanner(given, check_start(given).config, 100)


def test_the_worst_batch_is_planned_against_the_budget(corpus: tuple[Corpus, DataSettings]) -> None:
    texts, data = corpus
    said = check_worst(planner_of(memory_budget=1.0), texts, data)
    assert "the 4 longest sequences" in said
    assert "1.00 GiB of plan.memory_budget" in said
    states = max(planner_of().cost.states)
    with pytest.raises(PlanError, match=r"a sequence of [\d,]+ tokens does not fit plan.memory_budget: needs about"):
        check_worst(planner_of(memory_budget=states / 2**30 * 1.01), texts, data)
    with pytest.raises(PlanError, match="cannot be planned: .* raise token_capacity"):
        check_worst(planner_of(token_capacity=2, max_slices=4), texts, data)


def test_a_stream_may_bring_its_longest_at_any_time(corpus: tuple[Corpus, DataSettings]) -> None:
    texts, data = corpus
    streamed = dataclasses.replace(texts, stream=object())  # type: ignore[arg-type]
    assert "16,384" not in check_worst(planner_of(), texts, data)
    longest = dataclasses.replace(data, sequences_per_step=1)
    assert "the longest sequence, 16,384 tokens" in check_worst(planner_of(), streamed, longest)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("--parallel.stages", "4"), "parallel.stages is 4, but the model has 3 layers"),
        (("--model.config", '{"model_type": "llama", "hiden_size": 8}'), "hiden_size"),
    ],
)
def test_nothing_is_read_or_written(override: tuple[str, str], message: str, tmp_path: Path) -> None:
    config = write_corpus(tmp_path)
    done = train(config, *override)
    assert done.code == 2
    assert message in done.err
    assert done.err.strip().count("\n") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "corpus"]
