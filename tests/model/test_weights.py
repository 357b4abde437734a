"""Checkpoints in their families' own layouts: every tensor is used or named, and what is loaded is what was stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hub_models import FAMILIES, load
from planted import FAULTS, Outcome
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from infinipipe.model import Checkpoint, HubLayout, build_stage, load_config
from infinipipe.model.shards import SINGLE, Shards, dequantize
from infinipipe.train.model import open_model
from infinipipe.train.settings import DataSettings, ModelSettings, Settings
from infinipipe.verify.reference import plain_model

UNLIKE_THE_MODULE = ["Qwen3-MoE", "Mixtral", "OLMoE"]
PLACEMENTS: dict[str, tuple[tuple[int, ...], list[tuple[int, ...]]]] = {
    "plain": ((1, 2, 1), [(0,), (1,), (2,)]),
    "interleaved": ((1, 0, 2, 1), [(0, 2), (1, 3)]),
    "v": ((1, 1, 1, 1), [(0, 3), (1, 2)]),
}
"""Layers of every part, and parts of every stage."""
MULTI_MODAL = ["Gemma 3, multi-modal", "Qwen2.5-VL", "Qwen3-VL", "Qwen3-VL-MoE", "Mistral Small 3 (multi-modal)"]
TOKENS = torch.arange(1, 60)[None]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, tmp_path: Path) -> None:
    assert FAULTS[name].plant(tmp_path) is not Outcome.SILENT


@pytest.mark.parametrize("name", UNLIKE_THE_MODULE + MULTI_MODAL)
def test_stages_load_what_transformers_loads(name: str, tmp_path: Path) -> None:
    """As many experts as two digits number, in the order of their numbers; vision parts left out, by name."""
    FAMILIES[name].write(tmp_path)
    config = load_config(tmp_path)
    whole = build_stage(config, (4,), 0, checkpoint=tmp_path)
    expected = load(tmp_path)
    ours = plain_model(config, whole.model.state_dict(), torch.float32)
    with torch.no_grad():
        assert torch.equal(ours(input_ids=TOKENS).logits, expected(input_ids=TOKENS).logits)
    for layers, stages in PLACEMENTS.values():
        for parts in stages:
            for key, tensor in build_stage(config, layers, parts, checkpoint=tmp_path).model.state_dict().items():
                assert torch.equal(tensor, whole.model.state_dict()[key]), key
    unused = Checkpoint(tmp_path, config).unused
    assert bool(unused) == (name in MULTI_MODAL)
    assert not any("language_model" in key for key in unused.get("not of the language model", []))


@pytest.mark.parametrize(("name", "placement"), list(zip(UNLIKE_THE_MODULE, PLACEMENTS, strict=True)))
def test_stages_write_the_layout_that_they_read(name: str, placement: str, tmp_path: Path) -> None:
    FAMILIES[name].write(tmp_path)
    stored = Shards(tmp_path)
    seen: list[str] = []
    layers, stages = PLACEMENTS[placement]
    for parts in stages:
        model = build_stage(load_config(tmp_path), layers, parts, checkpoint=tmp_path).model
        written = HubLayout(model).convert(dict(model.named_parameters()), torch.float32)
        for key, tensor in written.items():
            assert torch.equal(tensor, stored.read(key)), key
        seen += written
    assert sorted(seen) == sorted(stored.tensors)


def test_a_stage_reads_its_own_tensors_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES["Qwen3-MoE"].write(tmp_path)
    read: list[str] = []
    plain = Shards.read

    def noted(self: Shards, name: str) -> torch.Tensor:
        read.append(name)
        return plain(self, name)

    monkeypatch.setattr(Shards, "read", noted)
    build_stage(load_config(tmp_path), (1, 2, 1), 1, checkpoint=tmp_path)
    assert len(read) == len(set(read))
    assert {name.split(".")[2] for name in read} == {"1", "2"}


def test_layers_that_the_settings_leave_out_are_named(tmp_path: Path) -> None:
    FAMILIES["Qwen3"].write(tmp_path)
    config = load_config(tmp_path)
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    checkpoint = Checkpoint(tmp_path, config)
    left = checkpoint.unused["of layers that model.config leaves out"]
    assert {name.split(".")[2] for name in left} == {"2", "3"}
    assert "not used, of layers that model.config leaves out: 22, such as model.layers.2." in checkpoint.describe()


def sizes(**changes: object) -> LlamaConfig:
    small = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(**small | {"vocab_size": 64} | changes)


def rewrite(folder: Path, **tensors: torch.Tensor) -> None:
    save_file(load_file(folder / SINGLE) | tensors, folder / SINGLE, metadata={"format": "pt"})


def quantise(tensor: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix in fp8 with one scale for every block, cut short at the edges; and the matrix that these mean."""
    rows, columns = tensor.shape
    stored = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    scales, meant = torch.empty(-(-rows // block), -(-columns // block)), torch.empty(tensor.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = tensor[part].abs().max() / 448
            stored[part] = (tensor[part] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[part] = stored[part].float() * scales[i, j]
    return stored, scales, meant


def test_fp8_weights_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    """Blocks of 16 on sides of 24 and 40: neither is a multiple."""
    AutoModelForCausalLM.from_config(sizes()).save_pretrained(tmp_path)
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
    plain = load_file(tmp_path / SINGLE)
    parts = {name: quantise(plain[name], 16) for name in names}
    stored = {name: part[0] for name, part in parts.items()}
    rewrite(tmp_path, **stored, **{f"{name}_scale_inv": part[1] for name, part in parts.items()})
    with pytest.raises(ValueError, match="which does not fit blocks of None"):
        build_stage(sizes(), (2,), 0, checkpoint=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not hasattr(load_config(tmp_path), "quantization_config")
    checkpoint = Checkpoint(tmp_path, load_config(tmp_path))
    assert "2 of them in fp8 with scales" in checkpoint.describe()
    state = build_stage(load_config(tmp_path), (2,), 0, checkpoint=checkpoint).model.state_dict()
    for name, (_, _, meant) in parts.items():
        assert torch.equal(state[name], meant)
        assert float((state[name] - plain[name]).abs().max()) > 0
    untouched = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(state[untouched], plain[untouched])


def test_one_scale_is_of_the_whole_matrix() -> None:
    stored = torch.randn(3, 5).to(torch.float8_e4m3fn)
    assert torch.equal(dequantize(stored, torch.tensor([2.0]), None), stored.float() * 2)


@pytest.mark.parametrize("differs", [True, False])
def test_a_head_stored_beside_a_tied_embedding_is_the_same_in_every_layout(differs: bool, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(sizes(tie_word_embeddings=True)).save_pretrained(tmp_path)
    embedding = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    rewrite(tmp_path, **{"lm_head.weight": embedding + (0.1 if differs else 0.0)})
    settings = Settings(
        model=ModelSettings(path=str(tmp_path), weights="load"), data=DataSettings(files=["x"], max_length=99)
    )
    model = open_model(settings)
    assert model.config.tie_word_embeddings is not differs
    assert any("trained apart" in line for line in model.report) is differs
    for layers in ((2,), (1, 1)):
        last = build_stage(model.config, layers, len(layers) - 1, checkpoint=tmp_path)
        assert torch.equal(last.model.state_dict()["lm_head.weight"], embedding + (0.1 if differs else 0.0))
        if len(layers) == 1:
            assert (last.model.get_input_embeddings().weight is last.head.weight) is not differs
        else:
            assert (last.shared is not None) is not differs


def test_tensors_are_ignored_by_pattern_only_if_the_settings_say(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(sizes()).save_pretrained(tmp_path)
    rewrite(tmp_path, **{"extra.one": torch.ones(1), "extra.two": torch.ones(1)})
    with pytest.raises(ValueError, match="2 tensors that the model has no place for, extra.one, extra.two"):
        Checkpoint(tmp_path, sizes())
    assert Checkpoint(tmp_path, sizes(), ignore=["extra.*"]).unused == {"by model.ignore": ["extra.one", "extra.two"]}


def test_what_a_family_or_training_has_no_use_for_is_left_out_by_name(tmp_path: Path) -> None:
    """Rotary frequencies that old versions wrote, and scales for computing in fp8."""
    AutoModelForCausalLM.from_config(sizes()).save_pretrained(tmp_path)
    frequencies, scale = "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.mlp.up_proj.input_scale"
    rewrite(tmp_path, **{frequencies: torch.ones(6), scale: torch.ones(1)})
    checkpoint = Checkpoint(tmp_path, sizes())
    assert checkpoint.unused == {
        "of no use to the family": [frequencies],
        "scales of quantised activations": [scale],
    }
    assert f"not used, of no use to the family: 1, {frequencies}" in checkpoint.describe()
