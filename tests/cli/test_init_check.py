"""The configuration to start from, and what is said of one before it trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infinipipe.cli.main import main
from infinipipe.cli.train import read_settings
from infinipipe.plan import PlanError
from infinipipe.train import machine
from infinipipe.train.machine import Machine
from infinipipe.train.model import model_config
from infinipipe.train.planning import StepPlanner
from tests.data.chat_templates import CHATML, chat_tokenizer
from tests.train.conftest import write_corpus


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of four cores and little memory."""
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *_: cls(torch.device("cpu"), 4, 2**28)))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_corpus(tmp_path)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.usefixtures("small")
def test_a_starter_fits_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("some words")
    assert main(["init", "mine.toml", "--data", "*.txt", "--stages", "3"]) == 0
    settings = read_settings(["mine.toml"])[0]
    assert settings.data.files == ["*.txt"]
    assert settings.parallel.stages == 3
    assert settings.plan.memory_budget == pytest.approx(0.8 * 2**28 / 3 / 2**30, rel=0.01)
    assert settings.train.output == "runs/mine"
    said = capsys.readouterr().out
    assert f"chunks of up to {settings.plan.token_capacity:,} tokens, for 4 cores with 0.2 GiB free" in said
    assert "next: infinipipe check mine.toml; infinipipe train mine.toml" in said


@pytest.mark.usefixtures("small")
def test_the_capacity_is_the_largest_of_which_a_chunk_a_stage_fits_without_recompute(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words")
    assert main(["init", "mine.toml", "--data", "*.txt", "--stages", "2"]) == 0
    capacity = read_settings(["mine.toml"])[0].plan.token_capacity
    assert capacity is not None
    assert capacity < 16384
    settings = read_settings(
        ["mine.toml", "--plan.recompute", "none", "--plan.num_slices", "1", f"--plan.token_capacity={2 * capacity}"]
    )[0]
    planner = StepPlanner(settings, model_config(settings.model, 8192), 16384)
    planner.plan([capacity] * 2)
    with pytest.raises(PlanError):
        planner.plan([2 * capacity] * 2)


def test_a_model_with_weights_and_tokenizer_is_continued(tmp_path: Path) -> None:
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "vocab_size": 400,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=512)).save_pretrained(tmp_path / "model")
    chat_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("some words")
    assert main(["init", "mine.toml", "--model", "model", "--data", "a.txt"]) == 0
    settings = read_settings(["mine.toml"])[0]
    assert (settings.model.path, settings.model.weights, settings.tokenizer.path) == ("model", "load", "model")
    assert (settings.data.max_length, settings.parallel.stages, settings.optimizer.learning_rate) == (512, 1, 1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.yaml"], "let the name 'mine.yaml' end in .toml"),
        (["there.toml"], "there.toml exists; name a new file"),
        (["mine.toml", "--stages", "0"], "stages must be at least 1"),
        (["mine.toml", "--stages", "9"], "parallel.stages is 9, but the model has 4 layers"),
        (["mine.toml", "--data", "none/*.txt"], "none/*.txt"),
        (["mine.toml", "--model", "none"], "none"),
        (["mine.toml", "--modle", "none"], "there is no option --modle; the nearest is --model"),
        (["none/mine.toml"], "cannot write 'none/mine.toml'"),
    ],
)
def test_what_cannot_be_started_from_is_refused_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "there.toml").write_text("")
    assert message in refused(capsys, "init", *arguments)
    assert files(tmp_path) == {"there.toml"}


def test_a_check_says_what_would_happen_and_writes_nothing(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(tmp_path)
    assert main(["check", str(config), "--optimizer.warmup_steps", "50", "--plan.memory_budget", "1"]) == 0
    said = capsys.readouterr().out
    for pattern in (
        r"llama model of 0.0M parameters, \d\+\d layers on 2 stages, float32",
        r"a typical step of 20 drawn, of 4 sequences, the longest of [\d,]+ tokens:",
        r"the largest of 20 drawn",
        r"a sequence of data.max_length, 16,384 tokens, could be planned",
        r"parallel.stages is 2, which takes 2 processes; this machine has \d+ cores? with [\d.]+ GiB free",
        r"expected: [\d,]+ tokens/s, .* by an estimate, plan.flops_per_second 5e\+10",
        r"warning: optimizer.warmup_steps is 50, but train.steps is 6",
        r"a checkpoint takes .* in .*/run/checkpoints, where 2 are kept and .* are free",
        r"the run would start anew in .*/run",
    ):
        assert re.search(pattern, said), (pattern, said)
    assert files(tmp_path) == before


def test_a_check_warns_of_a_sequence_that_could_not_be_planned_and_of_memory_that_is_not_there(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_free_memory", lambda: 2**18)
    assert main(["check", str(config), "--plan.memory_budget", "0.005", "--parallel.threads", "64"]) == 0
    said = capsys.readouterr().out
    assert "warning: a sequence of data.max_length, 16,384 tokens, could not be planned if one came: " in said
    assert "warning: 2 processes of parallel.threads 64 share " in said
    assert re.search(r"warning: .* are planned for, but 256.0 KiB are free here, for all processes", said), said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--plan.memory_budget=0.0001", "a typical step of 20 drawn cannot be planned: "),
        ('--optimizer.groups.a={"parameters": ["*.mpl.*"], "max_norm": 1}', "matches no parameter of the model"),
        ("--parallel.stages=7", "parallel.stages is 7, but the model has 3 layers"),
        ("--data.files=[]", "data.files is empty"),
        ("--train.resume=none", "none is no complete checkpoint"),
    ],
)
def test_a_check_ends_with_the_sentence_that_the_run_would_end_with(
    config: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert message in refused(capsys, "check", config, override)


def test_a_check_asks_for_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert "name a configuration file first: infinipipe check CONFIG" in refused(capsys, "check")
