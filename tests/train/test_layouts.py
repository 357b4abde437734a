"""Training in layouts of replicas, stages and sequence parallelism: the losses of the plain model, checkpoints between layouts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from infinipipe.cli.train import read_settings
from infinipipe.train.reference import plain_losses
from infinipipe.train.settings import Settings
from infinipipe.verify.pool import WorkerError

from .pooled import Workers, change, losses, run, with_parallel

Layout = tuple[int, int, int]
LAYOUTS: list[Layout] = [(2, 2, 1), (1, 2, 2), (2, 1, 2)]
STEPS = 6


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def settings(config: Path) -> Settings:
    return read_settings([str(config)])[0]


@pytest.fixture(scope="module")
def expected(settings: Settings) -> list[float]:
    return plain_losses(settings, STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_the_plain_models(
    pool: Workers, settings: Settings, expected: list[float], layout: Layout, tmp_path: Path
) -> None:
    records = run(pool, change(settings, layout, tmp_path))
    assert losses(records) == pytest.approx(expected, abs=1e-4)
    assert all(len(record["peak_bytes"]) == layout[1] for record in records)
    assert all(record["plan_wait_seconds"] >= 0 and record["planning_seconds"] > 0 for record in records)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) > 10_000


def test_released_parameters_and_another_order_train_the_same(
    pool: Workers, settings: Settings, expected: list[float], tmp_path: Path
) -> None:
    chosen = change(settings, (1, 2, 2), tmp_path)
    chosen = with_parallel(chosen, gather_policy="release", mesh_order=["replica", "sequence", "stage"])
    assert losses(run(pool, chosen)) == pytest.approx(expected, abs=1e-4)


def test_bfloat16_keeps_float32_masters(
    pool: Workers, settings: Settings, expected: list[float], tmp_path: Path
) -> None:
    chosen = change(settings, (1, 2, 2), tmp_path)
    chosen = replace(chosen, model=replace(settings.model, dtype="bfloat16"))
    assert losses(run(pool, chosen)) == pytest.approx(expected, abs=0.05)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").dtype == torch.float32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resuming_in_the_same_layout_is_exact(
    pool: Workers, settings: Settings, layout: Layout, tmp_path: Path
) -> None:
    whole = run(pool, change(settings, layout, tmp_path / "whole", checkpoint_every=0))
    stop = change(settings, layout, tmp_path / "parts", checkpoint_every=2, stop_after=4)
    assert len(run(pool, stop)) == 4
    resumed = run(pool, change(settings, layout, tmp_path / "parts", checkpoint_every=2))
    assert losses(resumed) == losses(whole)
    assert [record["plan_hash"] for record in resumed] == [record["plan_hash"] for record in whole]
    assert [record["gradient_norm"] for record in resumed] == [record["gradient_norm"] for record in whole]


def test_resuming_in_the_second_epoch_is_exact(pool: Workers, settings: Settings, tmp_path: Path) -> None:
    chosen = replace(settings, data=replace(settings.data, sequences_per_step=10))
    whole = run(pool, change(chosen, (2, 2, 1), tmp_path / "whole", checkpoint_every=0, steps=8))
    run(pool, change(chosen, (2, 2, 1), tmp_path / "parts", checkpoint_every=5, stop_after=5, steps=8))
    resumed = run(pool, change(chosen, (2, 2, 1), tmp_path / "parts", steps=8))
    assert losses(resumed) == losses(whole)


@pytest.mark.parametrize(("before", "after"), [((2, 2, 1), (1, 2, 2)), ((1, 2, 2), (2, 1, 2)), ((2, 1, 2), (1, 1, 4))])
def test_resuming_in_another_layout_keeps_the_trajectory(
    pool: Workers, settings: Settings, expected: list[float], before: Layout, after: Layout, tmp_path: Path
) -> None:
    run(pool, change(settings, before, tmp_path, checkpoint_every=3, stop_after=3))
    records = run(pool, change(settings, after, tmp_path))
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert losses(records) == pytest.approx(expected, abs=1e-4)


def test_damaged_checkpoints_are_passed_over_and_old_ones_go(
    pool: Workers, settings: Settings, expected: list[float], tmp_path: Path
) -> None:
    chosen = change(settings, (1, 2, 2), tmp_path, checkpoint_every=1, keep_checkpoints=3, stop_after=4)
    run(pool, chosen)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:08d}" for step in (2, 3, 4)]
    shard = max((folder / "step-00000004").glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-100])
    next((folder / "step-00000003").glob("*.distcp")).unlink()
    shutil.copytree(folder / "step-00000002", folder / "step-00000009.tmp")
    records = run(pool, change(settings, (1, 2, 2), tmp_path, checkpoint_mode="sync"))
    assert losses(records) == pytest.approx(expected, abs=1e-4)
    assert not (folder / "step-00000009.tmp").exists()


def test_never_sets_earlier_checkpoints_aside_and_a_path_is_followed(
    pool: Workers, settings: Settings, expected: list[float], tmp_path: Path
) -> None:
    run(pool, change(settings, (2, 2, 1), tmp_path, checkpoint_every=2, stop_after=2))
    records = run(pool, change(settings, (2, 2, 1), tmp_path, resume="never", stop_after=1))
    assert losses(records) == pytest.approx(expected[:1], abs=1e-4)
    aside = tmp_path / "checkpoints.1" / "step-00000002"
    records = run(pool, change(settings, (1, 2, 2), tmp_path / "other", resume=str(aside), stop_after=4))
    assert losses(records) == pytest.approx(expected[2:4], abs=1e-4)


def test_loading_sharded_safetensors_into_any_layout(
    pool: Workers, settings: Settings, expected: list[float], tmp_path: Path
) -> None:
    run(pool, change(settings, (2, 2, 1), tmp_path / "first"))
    assert len(list((tmp_path / "first" / "checkpoint").glob("*.safetensors"))) == 2
    loads = replace(settings.model, path=str(tmp_path / "first" / "checkpoint"), weights="load")
    chosen = change(replace(settings, model=loads), (1, 1, 4), tmp_path / "second", stop_after=1)
    assert run(pool, chosen)[0]["loss"] < expected[0] - 0.5


def test_failing_checkpoints_do_not_stop_training_until_the_end(
    pool: Workers, settings: Settings, expected: list[float], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    chosen = change(settings, (2, 2, 1), tmp_path, checkpoint_every=1, stop_after=3)
    with pytest.raises(WorkerError, match="step 3 could not be written to .*; make room"):
        run(pool, chosen)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.count('"kind": "step"') == 3
    (tmp_path / "checkpoints").unlink()
    assert losses(run(pool, chosen)) == pytest.approx(expected[:3], abs=1e-4)


def test_another_model_is_refused(settings: Settings, pool: Workers, tmp_path: Path) -> None:
    run(pool, change(settings, (2, 2, 1), tmp_path, checkpoint_every=1, stop_after=1))
    wider = replace(settings.model, config=settings.model.config | {"intermediate_size": 96})
    chosen = change(replace(settings, model=wider), (2, 2, 1), tmp_path)
    with pytest.raises(WorkerError, match="another model: its intermediate_size is 64, not 96"):
        run(pool, chosen)
