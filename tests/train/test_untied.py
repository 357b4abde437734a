"""Training a model whose head and embedding are published as one, but differ: apart from the start, and after a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from infinipipe.cli.train import read_settings
from infinipipe.model.shards import SINGLE, Shards
from infinipipe.runtime.pool import WorkerError
from infinipipe.train.convert import export
from infinipipe.train.reference import plain_losses
from infinipipe.train.settings import Settings

from .pooled import Record, Workers, change, losses, run, with_parallel

STEPS, SAVED = 4, 2
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Ran:
    """A run with a checkpoint on the way."""

    output: Path
    records: list[Record]

    @property
    def saved(self) -> Path:
        return self.output / "checkpoints" / f"step-{SAVED:08d}"


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def settings(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Starting from a checkpoint whose configuration ties a head that its file holds, and that differs."""
    settings = read_settings([str(config)])[0]
    fields: dict[str, Any] = {name: value for name, value in settings.model.config.items() if name != "model_type"}
    assert fields["tie_word_embeddings"]
    source = tmp_path_factory.mktemp("published")
    AutoModelForCausalLM.from_config(LlamaConfig(**fields)).save_pretrained(source)
    tensors = load_file(source / SINGLE)
    head = tensors[EMBEDDING].flip(0).contiguous()
    save_file(tensors | {HEAD: head}, source / SINGLE, metadata={"format": "pt"})
    model = replace(settings.model, path=str(source), weights="load", config={})
    return replace(settings, model=model, plan=replace(settings.plan, num_slices=2))


def placed(settings: Settings, placement: str, output: Path, **changes: object) -> Settings:
    """On two stages of two processes; v-shaped, the first has both embedding and head."""
    chosen = change(settings, (1, 2, 2), output, steps=STEPS, **changes)
    schedule = "zero-bubble" if placement == "v" else "auto"
    layers = [1, 1, 0, 1] if placement == "v" else [2, 1]
    chosen = with_parallel(chosen, placement=placement, stage_layers=layers)
    return replace(chosen, plan=replace(chosen.plan, schedule=schedule))


@pytest.fixture(scope="module", params=["plain", "v"])
def placement(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(pool: Workers, settings: Settings, placement: str, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    output = tmp_path_factory.mktemp(placement)
    return Ran(output, run(pool, placed(settings, placement, output, checkpoint_every=SAVED)))


def test_losses_are_the_plain_models(settings: Settings, whole: Ran) -> None:
    assert losses(whole.records) == pytest.approx(plain_losses(settings, STEPS), abs=1e-4)


@pytest.mark.parametrize("said", [True, False])
def test_resuming_is_exact(
    pool: Workers, settings: Settings, whole: Ran, placement: str, said: bool, tmp_path: Path
) -> None:
    """Whether or not the settings say what the file's weights say."""
    config = {"tie_word_embeddings": False} if said else {}
    again = replace(settings, model=replace(settings.model, config=config))
    records = run(pool, placed(again, placement, tmp_path, resume=str(whole.saved)))
    for key in ("loss", "gradient_norm", "plan_hash"):
        assert [record[key] for record in records] == [record[key] for record in whole.records[SAVED:]]
    one, other = Shards(whole.output / "checkpoint"), Shards(tmp_path / "checkpoint")
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.tensors)


def test_both_are_exported_and_trained(settings: Settings, whole: Ran, tmp_path: Path) -> None:
    export(whole.saved, tmp_path / "model")
    started = Shards(Path(settings.model.path))
    for folder in (whole.output / "checkpoint", tmp_path / "model"):
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
        model = AutoModelForCausalLM.from_pretrained(folder)
        for name in (EMBEDDING, HEAD):
            written = model.get_parameter(name).detach()
            assert torch.equal(written, Shards(folder).read(name))
            assert float((written - started.read(name)).abs().max()) > 1e-3
        assert not torch.allclose(model.get_parameter(EMBEDDING), model.get_parameter(HEAD), atol=1e-3)


def test_a_resume_that_ties_them_is_refused(pool: Workers, settings: Settings, whole: Ran, tmp_path: Path) -> None:
    tied = replace(settings, model=replace(settings.model, config={"tie_word_embeddings": True}))
    with pytest.raises(WorkerError, match="differs from model.embed_tokens.weight though the configuration ties them"):
        pool.run(placed(tied, "plain", tmp_path, resume=str(whole.saved)))
