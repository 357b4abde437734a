"""Training in layouts of replicas, stages and sequence parallelism: the losses of the plain model, checkpoints between layouts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infinipipe.cli.main import main
from infinipipe.cli.train import read_settings
from infinipipe.runtime.pool import WorkerError
from infinipipe.train.convert import export
from infinipipe.train.reference import plain_losses
from infinipipe.train.settings import Settings
from infinipipe.train.store import CheckpointFolder

from .pooled import Record, Workers, change, losses, read_records, run, with_parallel

Layout = tuple[int, int, int]
LAYOUTS: list[Layout] = [(2, 2, 1), (1, 2, 2), (2, 1, 2)]
STEPS, SAVED = 4, 2


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def settings(config: Path) -> Settings:
    """Batches of which the second begins a new epoch, so that the checkpoint after it is in the second."""
    settings = read_settings([str(config)])[0]
    data = replace(settings.data, sequences_per_step=20)
    return replace(settings, data=data, plan=replace(settings.plan, num_slices=2))


@pytest.fixture(scope="module")
def expected(settings: Settings) -> list[float]:
    return plain_losses(settings, STEPS)


@dataclass(frozen=True)
class Ran:
    """A finished run, with the records of its steps."""

    output: Path
    records: list[Record]

    @property
    def saved(self) -> Path:
        return self.output / "checkpoints" / f"step-{SAVED:08d}"


@pytest.fixture(scope="module")
def runs(pool: Workers, settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Ran]:
    """A run in every layout, with checkpoints on the way and at the end."""
    done = {}
    for layout in LAYOUTS:
        output = tmp_path_factory.mktemp("layout")
        done[layout] = Ran(output, run(pool, change(settings, layout, output, checkpoint_every=SAVED, steps=STEPS)))
    return done


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_the_plain_models(runs: dict[Layout, Ran], expected: list[float], layout: Layout) -> None:
    records = runs[layout].records
    assert losses(records) == pytest.approx(expected, abs=1e-4)
    assert all(len(record["peak_bytes"]) == layout[1] for record in records)
    model = AutoModelForCausalLM.from_pretrained(runs[layout].output / "checkpoint")
    assert model.dtype == torch.float32


def test_exported_weights_are_the_same_from_every_layout(runs: dict[Layout, Ran]) -> None:
    first, *others = [AutoModelForCausalLM.from_pretrained(ran.output / "checkpoint") for ran in runs.values()]
    for other in others:
        for (name, ours), theirs in zip(first.named_parameters(), other.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=2e-3), name


def test_a_checkpoint_is_exported_at_any_time(
    runs: dict[Layout, Ran], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs[1, 2, 2].output
    assert main(["export", str(folder), str(tmp_path / "model")]) == 0
    assert "step-00000004" in capsys.readouterr().out
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "model", folder / "checkpoint"))
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), name
    text = "alpha beta"
    assert AutoTokenizer.from_pretrained(tmp_path / "model")(text) == AutoTokenizer.from_pretrained(
        folder / "checkpoint"
    )(text)
    export(runs[1, 2, 2].saved, tmp_path / "shards", shard_bytes=20_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "shards").dtype == torch.float32
    assert main(["export", str(folder), str(tmp_path / "model")]) == 2
    assert "exists; name a new folder" in capsys.readouterr().err


def resumed(pool: Workers, settings: Settings, layout: Layout, checkpoint: Path, output: Path) -> list[Record]:
    return run(pool, change(settings, layout, output, steps=STEPS, resume=str(checkpoint)))


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_resuming_in_the_same_layout_is_exact(
    pool: Workers, settings: Settings, runs: dict[Layout, Ran], layout: Layout, tmp_path: Path
) -> None:
    position = json.loads((runs[layout].saved / "manifest.json").read_text())["position"]
    (order,) = position["orders"]
    assert order["epoch"] == 1
    assert order["position"] > 0
    records = resumed(pool, settings, layout, runs[layout].saved, tmp_path)
    whole = runs[layout].records[SAVED:]
    for key in ("loss", "gradient_norm", "plan_hash", "tokens"):
        assert [record[key] for record in records] == [record[key] for record in whole]


@pytest.mark.parametrize(("before", "after"), [((2, 2, 1), (1, 2, 2)), ((1, 2, 2), (2, 1, 2)), ((2, 1, 2), (1, 1, 4))])
def test_resuming_in_another_layout_keeps_the_trajectory(
    pool: Workers,
    settings: Settings,
    runs: dict[Layout, Ran],
    expected: list[float],
    before: Layout,
    after: Layout,
    tmp_path: Path,
) -> None:
    records = resumed(pool, settings, after, runs[before].saved, tmp_path)
    assert [record["step"] for record in records] == [3, 4]
    assert losses(records) == pytest.approx(expected[SAVED:], abs=1e-4)


def test_resuming_with_other_layers_a_stage_keeps_the_trajectory(
    pool: Workers, settings: Settings, runs: dict[Layout, Ran], expected: list[float], tmp_path: Path
) -> None:
    uneven = with_parallel(settings, stage_layers=[1, 2])
    records = resumed(pool, uneven, (2, 2, 1), runs[2, 2, 1].saved, tmp_path)
    assert losses(records) == pytest.approx(expected[SAVED:], abs=1e-4)
    assert [record["plan_hash"] for record in records] != [r["plan_hash"] for r in runs[2, 2, 1].records[SAVED:]]


def test_bfloat16_released_parameters_and_another_order(
    pool: Workers, settings: Settings, expected: list[float], tmp_path: Path
) -> None:
    chosen = change(settings, (1, 2, 2), tmp_path, stop_after=2)
    chosen = with_parallel(chosen, gather_policy="release", mesh_order=["replica", "sequence", "stage"])
    chosen = replace(chosen, model=replace(settings.model, dtype="bfloat16"))
    assert losses(run(pool, chosen)) == pytest.approx(expected[:2], abs=0.05)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").dtype == torch.float32


def test_damaged_checkpoints_are_passed_over(
    pool: Workers, settings: Settings, runs: dict[Layout, Ran], expected: list[float], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(runs[1, 2, 2].output / "checkpoints", folder)
    shard = max((folder / "step-00000004").glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-100])
    (folder / "step-00000009.tmp").mkdir()
    records = run(pool, change(settings, (1, 2, 2), tmp_path, steps=STEPS, checkpoint_mode="sync", stop_after=3))
    assert [record["step"] for record in records] == [3]
    assert losses(records) == pytest.approx(expected[2:3], abs=1e-4)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000004"]


def test_never_starts_anew(pool: Workers, settings: Settings, runs: dict[Layout, Ran], tmp_path: Path) -> None:
    shutil.copytree(runs[1, 2, 2].output / "checkpoints", tmp_path / "checkpoints")
    records = run(pool, change(settings, (1, 2, 2), tmp_path, resume="never", stop_after=1))
    assert [record["step"] for record in records] == [1]
    assert (tmp_path / "checkpoints.1" / "step-00000002").is_dir()


def test_loading_sharded_safetensors_into_any_layout(
    pool: Workers, settings: Settings, runs: dict[Layout, Ran], expected: list[float], tmp_path: Path
) -> None:
    model = runs[2, 2, 1].output / "checkpoint"
    assert len(list(model.glob("*.safetensors"))) == 2
    loads = replace(settings.model, path=str(model), weights="load")
    chosen = change(replace(settings, model=loads), (1, 1, 4), tmp_path, stop_after=1)
    assert run(pool, chosen)[0]["loss"] < expected[0] - 0.5


def test_a_full_disk_at_save_is_said_and_training_goes_on(pool: Workers, settings: Settings, tmp_path: Path) -> None:
    wide = replace(settings, model=replace(settings.model, config=settings.model.config | {"intermediate_size": 2048}))
    chosen = change(wide, (2, 2, 1), tmp_path, checkpoint_every=1, steps=STEPS, stop_after=2)
    with pytest.raises(WorkerError, match="checkpoint of step 2 could not be written to .*File too large.*make room"):
        pool.run(chosen, largest_file=1_000_000)
    assert len(read_records(chosen)) == 2
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_folder_that_cannot_be_written_is_said(pool: Workers, settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(WorkerError, match="the checkpoint of step 1 could not be written to .*File exists"):
        pool.run(change(settings, (2, 2, 1), tmp_path, stop_after=1))


@pytest.mark.parametrize("evaluate_every", [0, 1])
def test_an_evaluation_that_fails_loses_no_step(
    pool: Workers, settings: Settings, tmp_path: Path, evaluate_every: int
) -> None:
    """Neither after the last step, nor after one whose checkpoint is still being written."""
    last = 1 if evaluate_every else 2
    chosen = change(settings, (2, 2, 1), tmp_path, checkpoint_every=1, steps=STEPS, stop_after=2)
    chosen = replace(chosen, train=replace(chosen.train, evaluate_every=evaluate_every))
    with pytest.raises(WorkerError, match="the held-out sequences are refused"):
        pool.run(chosen, evaluation_fails=True)
    records = read_records(chosen)
    assert [record["step"] for record in records] == list(range(1, last + 1))
    newest = CheckpointFolder(tmp_path / "checkpoints", keep=2).newest()
    assert newest is not None
    assert newest[1].step == last
    assert [record["step"] for record in run(pool, replace(chosen, train=replace(chosen.train, stop_after=3)))] == [
        1,
        2,
        3,
    ]
    assert (tmp_path / "checkpoint" / "config.json").is_file()


def test_another_model_is_refused(pool: Workers, settings: Settings, runs: dict[Layout, Ran], tmp_path: Path) -> None:
    wider = replace(settings.model, config=settings.model.config | {"intermediate_size": 96})
    with pytest.raises(WorkerError, match="another model: its intermediate_size is 64, not 96"):
        resumed(pool, replace(settings, model=wider), (2, 2, 1), runs[2, 2, 1].saved, tmp_path)


def test_divergence_names_the_documents_and_stops_before_the_weights_change(
    pool: Workers, settings: Settings, tmp_path: Path
) -> None:
    steep = replace(settings, optimizer=replace(settings.optimizer, learning_rate=1e30))
    chosen = change(steep, (2, 2, 1), tmp_path, steps=STEPS, checkpoint_every=1)
    with pytest.raises(
        WorkerError, match=r"step 2: the loss is .* not finite; .* documents .*\.txt.*lower optimizer"
    ) as failed:
        pool.run(chosen)
    assert "the weights were left as they were" in str(failed.value)
    assert len(read_records(chosen)) == 1
    assert not (tmp_path / "checkpoint").exists()
