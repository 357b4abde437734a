"""A run that is started again with other settings: what that does to its learning rate, and where there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from infinipipe.cli.train import read_settings
from infinipipe.settings import SettingError
from infinipipe.train.job import Job
from infinipipe.train.loop import Run
from infinipipe.train.store import CheckpointError

ALONE = ("--parallel.stages", "1", "--plan.ahead", "0", "--train.evaluate_every", "0", "--train.checkpoint_every", "2")
Start = Callable[..., str]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield Job.among(range(1), torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture
def start(job: Job, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Start:
    """Starts the run with some settings; returns what it says."""

    def begin(*given: str) -> str:
        settings, text = read_settings([str(config), "--train.output", str(tmp_path), *ALONE, *given])
        settings = replace(settings, data=replace(settings.data, sequences_per_step=4))
        assert Run(job, settings, text).execute() == 0
        return capsys.readouterr().out

    return begin


def written(folder: Path) -> int:
    """When the model of a run was written."""
    return (folder / "checkpoint" / "model.safetensors").stat().st_mtime_ns


def test_more_steps_are_said_with_what_they_do_to_the_rate(start: Start) -> None:
    assert "warning" not in start("--train.steps", "4")
    said = start("--train.steps", "8")
    assert (
        "warning: train.steps was 4 and is 8: the learning rate of step 5 is 0.00775, where that of step 4 was 0.0055 and the "
        "earlier settings would go on with 0.001\n"
    ) in said


def test_a_warm_up_that_is_longer_than_the_run_is_said(start: Start) -> None:
    said = start("--train.steps", "2", "--optimizer.warmup_steps", "100")
    assert (
        "warning: optimizer.warmup_steps is 100, but train.steps is 2: the learning rate rises to 0.0002 only" in said
    )


def test_a_run_that_is_done_says_so_and_leaves_its_model_alone(start: Start, tmp_path: Path) -> None:
    start("--train.steps", "2")
    before = written(tmp_path)
    said = start("--train.steps", "2")
    assert "all 2 steps are done; raise train.steps, or set train.resume to never" in said
    assert f"the model after step 2 is in {tmp_path / 'checkpoint'} already" in said
    assert written(tmp_path) == before
    (tmp_path / "checkpoint" / "README.md").unlink()
    assert f"wrote {tmp_path / 'checkpoint'}" in start("--train.steps", "2")
    assert written(tmp_path) > before


def test_a_run_beyond_its_stop_says_where_it_is_and_leaves_its_model_alone(start: Start, tmp_path: Path) -> None:
    start("--train.steps", "6", "--train.stop_after", "4")
    before = written(tmp_path)
    said = start("--train.steps", "6", "--train.stop_after", "2")
    assert (
        "the run is at step 4 of 6, and train.stop_after, counted from the first step of all, is 2: there is nothing"
        in said
    )
    assert f"no model is written; 'infinipipe export {tmp_path} OUTPUT' writes that of a checkpoint" in said
    said = start("--train.steps", "3")
    assert "the run is at step 4, beyond train.steps, which is 3; raise it" in said
    assert written(tmp_path) == before


def test_states_of_another_optimizer_are_refused_and_equal_ones_taken(start: Start) -> None:
    start("--train.steps", "4", "--train.stop_after", "2")
    for name in ("sgd", "nadam", "adagrad"):
        with pytest.raises(
            CheckpointError, match=f"has the states of optimizer.name adamw, which are not those of {name};"
        ):
            start("--train.steps", "4", "--optimizer.name", name)
    said = start("--train.steps", "4", "--optimizer.name", "adam")
    assert "warning: optimizer.name was adamw and is adam, which goes on from the same states" in said


def test_momentum_that_a_checkpoint_lacks_is_refused(start: Start) -> None:
    start("--train.steps", "4", "--train.stop_after", "2", "--optimizer.name", "sgd", "--optimizer.momentum", "0")
    with pytest.raises(CheckpointError, match=r"optimizer.momentum is 0.9, but was 0 in the checkpoint .* lack it"):
        start("--train.steps", "4", "--optimizer.name", "sgd")


def test_groups_are_said_and_a_pattern_that_matches_nothing_is_refused(
    start: Start, config: Path, tmp_path: Path
) -> None:
    group = "--optimizer.groups.ends"
    said = start("--train.steps", "1", f"{group}.parameters", '["*embed*"]', f"{group}.learning_rate", "0.001")
    assert "optimizer.groups.ends: 1 parameter with learning_rate 0.001" in said
    with pytest.raises(
        SettingError, match=r"optimizer.groups.ends.parameters has '\*head\*', which matches no parameter"
    ):
        start("--train.steps", "2", f"{group}.parameters", '["*head*"]', f"{group}.learning_rate", "0.001")
