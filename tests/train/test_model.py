"""The model and the planner that settings describe, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinipipe.data import DataSettings
from infinipipe.train.model import model_config
from infinipipe.train.planning import StepPlanner
from infinipipe.train.settings import ModelSettings, ParallelSettings, PlanSettings, Settings

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
        ({"vocab_size": 100}, "model.config.vocab_size is 100, but the tokenizer has 300"),
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
