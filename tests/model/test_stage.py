"""Stages: the same model whatever their number, and no more of it than their share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from infinipipe.cost import even_stages
from infinipipe.model import build_stage
from infinipipe.model.shards import INDEX, write_index, write_shard
from infinipipe.runtime import MemoryMeter
from infinipipe.verify import FAMILIES


def states(family: str, num_stages: int, **kwargs: object) -> list[dict[str, torch.Tensor]]:
    config = FAMILIES[family]()
    layers = even_stages(config.num_hidden_layers, num_stages)
    return [build_stage(config, layers, i, **kwargs).model.state_dict() for i in range(num_stages)]  # type: ignore[arg-type]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_initial_weights_do_not_depend_on_the_number_of_stages(family: str) -> None:
    (whole,) = states(family, 1, seed=5)
    for num_stages in (2, 4):
        parts = states(family, num_stages, seed=5)
        assert set().union(*parts) == set(whole)
        for part in parts:
            for name, tensor in part.items():
                assert torch.equal(tensor, whole[name]), name
    (other,) = states(family, 1, seed=6)
    assert not torch.equal(other["model.layers.0.mlp.up_proj.weight"], whole["model.layers.0.mlp.up_proj.weight"])


def test_buffers_are_those_of_the_plain_model() -> None:
    for family, make in FAMILIES.items():
        config = make()
        plain = dict(AutoModelForCausalLM.from_config(config).named_buffers())
        for index in range(2):
            stage = build_stage(config, even_stages(4, 2), index, dtype=torch.bfloat16)
            for name, buffer in stage.model.named_buffers():
                assert torch.equal(buffer, plain[name]), (family, name)
                assert buffer.dtype == plain[name].dtype


def test_a_stage_holds_its_share_and_never_more() -> None:
    config = FAMILIES["llama"](num_hidden_layers=16, hidden_size=64, intermediate_size=256, vocab_size=1000)
    layers = even_stages(16, 4)
    for index in range(4):
        with MemoryMeter() as meter:
            stage = build_stage(config, layers, index)
            share = sum(p.numel() * 4 for p in stage.model.parameters())
        largest = max(p.numel() * 4 for p in stage.model.parameters())
        assert meter.peak <= share + 2 * largest


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_stages_read_their_tensors_from_a_checkpoint_of_transformers(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config)
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / INDEX).exists()
    expected = plain.state_dict()
    for num_stages in (1, 3):
        for part in states(family, num_stages, checkpoint=tmp_path):
            for name, tensor in part.items():
                assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_transformers_reads_what_stages_write(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    parts = states(family, 3, seed=9)
    if config.tie_word_embeddings:
        del parts[-1]["lm_head.weight"]
    sizes = [write_shard(part, tmp_path, index, 3) for index, part in enumerate(parts)]
    write_index(sizes, tmp_path)
    config.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(loaded[name], tensor)


def test_a_checkpoint_that_does_not_fit_is_named(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        build_stage(config, (4,), 0, checkpoint=tmp_path)
    AutoModelForCausalLM.from_config(FAMILIES["llama"](num_hidden_layers=3)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tensor 'model.layers.3"):
        build_stage(config, (4,), 0, checkpoint=tmp_path)
    AutoModelForCausalLM.from_config(FAMILIES["llama"](intermediate_size=48)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has shape \(32, 48\), but the model needs \(32, 40\)"):
        build_stage(config, (4,), 0, checkpoint=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="damaged or cut short"):
        build_stage(config, (4,), 0, checkpoint=tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / INDEX).write_text(json.dumps({"weights": {}}))
    with pytest.raises(ValueError, match="not a safetensors index"):
        build_stage(config, (4,), 0, checkpoint=tmp_path)


def test_the_random_state_of_the_caller_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    build_stage(FAMILIES["llama"](), (4,), 0, seed=3)
    assert torch.equal(torch.rand(1), expected)
