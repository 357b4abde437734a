"""What a run exports: the layout, the dtype, the configuration and the files that other programs expect."""

from __future__ import annotations

import json
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, PretrainedConfig

from infinipipe.cli.main import main
from infinipipe.data import DataSettings, TokenizerSettings, train_tokenizer
from infinipipe.model import covering, hub_fields
from infinipipe.model.shards import Shards
from infinipipe.train.assets import keep_assets
from infinipipe.train.settings import ModelSettings, OptimizerSettings, PlanSettings, Settings

from .pooled import Workers, change

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Ran:
    """A run of one step, with the model that it started from."""

    source: Path
    output: Path

    @property
    def model(self) -> Path:
        return self.output / "checkpoint"

    def config(self, folder: Path | None = None) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(((folder or self.model) / "config.json").read_text())
        return fields


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One step from experts in bfloat16 with YaRN by the settings, on sharded states: two stages of two processes."""
    folder = tmp_path_factory.mktemp("export")
    config = hf.Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=11,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    source = folder / "source-model"
    hf.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(source)
    train_tokenizer(["def f(x): return x + 1"], folder / "tokenizer", vocab_size=300)
    for path in (folder / "tokenizer").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 106], "temperature": 0.6, "do_sample": true}')
    (source / "chat_template.jinja").write_text(TEMPLATE)
    (source / "LICENSE.txt").write_text("as it was")
    (folder / "texts").mkdir()
    for number in range(6):
        (folder / "texts" / f"{number}.txt").write_text(f"def f{number}(x): return x + {number}\n" * (3 + 4 * number))
    settings = Settings(
        model=ModelSettings(
            path=str(source),
            weights="load",
            config={"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        ),
        data=DataSettings(
            files=[f"{folder}/texts/*.txt"], cache=f"{folder}/cache", held_out=0, max_length=600, sequences_per_step=4
        ),
        tokenizer=TokenizerSettings(path=str(source)),
        plan=PlanSettings(planner="elastic-paper", num_slices=2),
        optimizer=OptimizerSettings(learning_rate=0.01, warmup_steps=0),
    )
    pool = Workers()
    try:
        pool.run(change(settings, (1, 2, 2), folder / "run", steps=1, checkpoint_every=1))
    finally:
        pool.close()
    return Ran(source, folder / "run")


def test_weights_have_the_sources_names_and_dtype(ran: Ran) -> None:
    stored, written = Shards(ran.source).tensors, Shards(ran.model).tensors
    assert written.keys() == stored.keys()
    assert {name: tensor.shape for name, tensor in written.items()} == {name: t.shape for name, t in stored.items()}
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    model = hf.AutoModelForCausalLM.from_pretrained(ran.model)
    assert model.dtype == torch.bfloat16
    moved = (model.lm_head.weight.detach().float() - Shards(ran.source).read("lm_head.weight").float()).abs().max()
    assert 1e-4 < float(moved) < 0.1


def test_the_configuration_is_spelled_for_both_versions(ran: Ran) -> None:
    fields = ran.config()
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert fields["rope_parameters"] == scaling | {"rope_theta": 1e6}
    assert (fields["rope_scaling"], fields["rope_theta"]) == (scaling, 1e6)
    assert (fields["dtype"], fields["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert fields["architectures"] == ["Qwen3MoeForCausalLM"]
    assert fields["num_experts"] == fields["num_local_experts"] == 11
    assert "quantization_config" not in fields
    assert not any(str(ran.source) in str(value) for value in fields.values())
    lengths = [len(AutoTokenizer.from_pretrained(ran.source)(path.read_text())["input_ids"]) + 1 for path in texts(ran)]
    assert 256 < max(lengths) <= fields["max_position_embeddings"] < 600


def texts(ran: Ran) -> list[Path]:
    return list((ran.source.parent / "texts").iterdir())


def test_files_are_carried_over_as_they_were(ran: Ran) -> None:
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE.txt"):
        assert (ran.model / name).read_bytes() == (ran.source / name).read_bytes(), name
    tokenizer = AutoTokenizer.from_pretrained(ran.model)
    assert tokenizer.chat_template == TEMPLATE
    theirs, ours = (json.loads((place / "tokenizer_config.json").read_text()) for place in (ran.source, ran.model))
    assert ours == theirs | {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert hf.GenerationConfig.from_pretrained(ran.model).eos_token_id == [1, 106]


@pytest.mark.parametrize("in_config", [False, True])
def test_a_changed_chat_template_is_written_in_place_of_the_sources(ran: Ran, tmp_path: Path, in_config: bool) -> None:
    """In whichever file the source keeps its own; and folders with the names of files are left alone."""
    source = tmp_path / "source"
    shutil.copytree(ran.source, source)
    if in_config:
        (source / "chat_template.jinja").unlink()
        fields = json.loads((source / "tokenizer_config.json").read_text())
        (source / "tokenizer_config.json").write_text(json.dumps(fields | {"chat_template": TEMPLATE}))
    (source / "LICENSES").mkdir()
    tokenizer = AutoTokenizer.from_pretrained(source)
    assert tokenizer.chat_template == TEMPLATE
    tokenizer.chat_template = TEMPLATE + "!"
    for _ in range(2):
        keep_assets(tmp_path, tokenizer, str(source))
        kept = tmp_path / "assets"
        assert AutoTokenizer.from_pretrained(kept).chat_template == TEMPLATE + "!"
        assert (kept / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
        assert (kept / "LICENSE.txt").is_file()
        assert not (kept / "LICENSES").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "assets"}


def test_the_card_tells_of_data_settings_and_plans(ran: Ran) -> None:
    card = (ran.model / "README.md").read_text()
    record = json.loads((ran.output / "metrics.jsonl").read_text().splitlines()[0])
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "Trained for 1 step, started from the weights of `source-model`; written in bfloat16." in card
    assert "* 6 documents in 6 files" in card
    assert f"| tokens | {record['tokens']:,} |" in card
    assert f"| slices of the most finely cut sequence | {record['plan']['most_slices']} |" in card
    assert "```yaml\ntext: kept\n```" in card


def test_a_checkpoint_is_exported_as_the_run_exports(ran: Ran, tmp_path: Path) -> None:
    assert main(["export", str(ran.output), str(tmp_path / "model")]) == 0
    written, again = Shards(ran.model), Shards(tmp_path / "model")
    assert written.tensors.keys() == again.tensors.keys()
    assert all(torch.equal(written.read(name), again.read(name)) for name in written.tensors)
    others = {path.name for path in ran.model.iterdir() if path.suffix != ".safetensors"} - {
        "model.safetensors.index.json"
    }
    for name in others:
        assert (tmp_path / "model" / name).read_bytes() == (ran.model / name).read_bytes(), name
    assert main(["export", str(ran.output), str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    assert {tensor.dtype for tensor in Shards(tmp_path / "wide").tensors.values()} == {torch.float32}
    assert ran.config(tmp_path / "wide")["torch_dtype"] == "float32"


def test_an_export_that_cannot_be_written_is_said(ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not as a fault of the checkpoint; and nothing is left behind."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        code = main(["export", str(ran.output), str(tmp_path / "model")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    assert f"cannot write the folder '{tmp_path / 'model'}': " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("where a folder should be")
    assert main(["export", str(ran.output), str(tmp_path / "file" / "model")]) == 2
    assert "cannot write the folder" in capsys.readouterr().err


def test_a_checkpoint_without_its_run_needs_a_dtype(
    ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "elsewhere" / "step"
    moved.parent.mkdir()
    moved.symlink_to(ran.output / "checkpoints" / "step-00000001")
    assert main(["export", str(moved), str(tmp_path / "model")]) == 2
    assert "name --dtype" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        (LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}), 500000.0, None),
        (LlamaConfig(rope_parameters=LLAMA3 | {"rope_theta": 500000.0}), 500000.0, LLAMA3),
        (hf.Gemma3TextConfig(), 1000000.0, None),
    ],
    ids=["default", "llama3", "gemma3"],
)
def test_theta_and_scaling_are_in_both_spellings(
    config: PretrainedConfig, theta: float, scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    fields = hub_fields(config, "X", "float32")
    assert (fields["rope_theta"], fields["rope_scaling"]) == (theta, scaling)
    assert fields.get("rope_local_base_freq") == (10000.0 if config.model_type == "gemma3_text" else None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


def test_positions_cover_what_was_trained_on_where_that_changes_nothing_else() -> None:
    assert covering(LlamaConfig(max_position_embeddings=4096), 5000).max_position_embeddings == 5000
    assert covering(LlamaConfig(max_position_embeddings=4096), 300).max_position_embeddings == 4096
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 1e4}
    assert (
        covering(LlamaConfig(max_position_embeddings=2048, rope_parameters=yarn), 300).max_position_embeddings == 8192
    )
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert (
        covering(LlamaConfig(max_position_embeddings=4096, rope_parameters=dynamic), 5000).max_position_embeddings
        == 4096
    )
