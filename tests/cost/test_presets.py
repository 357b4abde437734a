"""Presets against the published calibration, and cost files."""

import dataclasses
from pathlib import Path

import pytest

from infinipipe.cost import CostError, Holding, WorkingSet, load_cost, preset, preset_names, save_cost
from infinipipe.cost.presets import CALIBRATIONS, MODELS, RESIDENT_SHARE


def test_the_calibrated_model_has_the_published_coefficients() -> None:
    cost = preset("7b-a100", 4, sequence_parallel=1, holding=Holding(gather_policy="release"))
    length = 10_000
    known = CALIBRATIONS["a100"]
    expected = known.pair * length**2 + known.token * length
    assert cost.compute_seconds([length]) == pytest.approx(expected)
    assert cost.chunk_seconds() == pytest.approx(0.629)
    assert preset("7b-a100", 4).chunk_seconds() == pytest.approx(0.629 * RESIDENT_SHARE)
    per_token = (cost.memory.layer + cost.memory.layer_kv) * 32
    assert per_token == pytest.approx(4.71e6)


def test_other_models_are_scaled_and_say_so() -> None:
    for name in preset_names():
        cost = preset(name, 8)
        assert ("scaled" in cost.source) == (not name.startswith("7b"))
    small, large = preset("7b-a100", 4), preset("13b-a100", 4)
    ratio = large.forward.token * 40 / (small.forward.token * 32)
    weights = MODELS["13b"].mean_work * 40 / (MODELS["7b"].mean_work * 32)
    assert ratio == pytest.approx(weights)


def test_cost_files_come_back_equal(tmp_path: Path) -> None:
    cost = preset("30b-a100", (20, 20, 20))
    path = tmp_path / "cost.json"
    save_cost(cost, path)
    assert load_cost(path) == cost
    assert [entry.name for entry in tmp_path.iterdir()] == ["cost.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"version": 2', '"version": 9'), "not of version 2"),
        (('"pair"', '"pears"'), "unknown field 'pears'"),
        (('"stage_layers": [', '"stage_layers": ["a",'), "stage_layers must be a list of whole numbers"),
        (("{", "["), "not JSON"),
        (("{", "[" * 100_000), "not JSON"),
        (('"forward": {', '"forward": null, "x": {'), "forward must be an object"),
        (('"latency": 2e-05', '"latency": NaN'), "latency is 'nan'; it must be a number"),
        (('"latency": 2e-05', '"latency": 1e308'), "latency is '1e.308'; it must be a number of at most"),
        (('"states": [', '"states": [-1,'), "states must be a list of whole numbers from 0"),
        (('"sequence_parallel": 8', '"sequence_parallel": "8"'), "sequence_parallel is '8'; it must be a whole number"),
        (('"tied": false', '"tied": 3'), "cost.json: shape.tied is '3'; it must be true or false"),
        (('"all_to_alls": 4', '"all_to_alls": true'), "cost.json: all_to_alls is 'True'; it must be a whole number"),
        (
            ('"sequence_parallel": 8', '"sequence_parallel": 0'),
            "cost.json: sequence_parallel is 0; it must be at least 1",
        ),
        (('"pair": ', '"pair": -'), "cost.json: forward.pair is -.*; it must be at least 0"),
        (('"full": 0.0', '"full": -1.0'), "cost.json: forward.full is -1.0; it must be at least 0"),
        (('"context": 0.0', '"context": -1.0'), "cost.json: forward.context is -1.0; it must be at least minus pair"),
        (('"latency": 2e-05', '"latency": -2e-05'), "cost.json: message.latency is -2e-05; it must be at least 0"),
        (('"optimizer": 0.0', '"optimizer": -1.0'), "cost.json: optimizer is -1.0; it must be at least 0"),
        (('"layers": 32', '"layers": 31'), r"cost.json: shape.layers is 31, but stage_layers \[16, 16\] add up to 32"),
    ],
)
def test_broken_cost_files_are_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "cost.json"
    save_cost(preset("7b-a100", 2), path)
    broken = path.read_text().replace(*change, 1)
    assert broken != path.read_text()
    path.write_text(broken)
    with pytest.raises(CostError, match=message) as caught:
        load_cost(path)
    assert "cost.json" in str(caught.value)


def test_what_a_fit_may_make_negative_is_read(tmp_path: Path) -> None:
    cost = preset("7b-a100", 2)
    cost = dataclasses.replace(
        cost,
        forward=dataclasses.replace(cost.forward, context=-cost.forward.pair),
        memory=dataclasses.replace(cost.memory, layer=-1.0, backward=WorkingSet(attention=-1.0)),
    )
    save_cost(cost, tmp_path / "cost.json")
    assert load_cost(tmp_path / "cost.json") == cost


def test_unknown_presets_list_the_known_ones() -> None:
    with pytest.raises(CostError, match="7b-a100"):
        preset("8b-b200", 4)
    with pytest.raises(CostError, match="32 layers"):
        preset("7b-a100", (1, 2))
    with pytest.raises(CostError, match="cannot read the cost file"):
        load_cost("/nowhere/cost.json")
