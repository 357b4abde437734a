"""Every command in README.md and docs/ runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SMALL_PROFILE = "--longest 128 --capacity 64 --smallest 16 --max_slices 4 --plans 8 --repeats 1"
SMALL_MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
DRY_MAKE = ("make", "--dry-run", "--no-print-directory", "--assume-old=.venv/.installed")
PROGRAMS = ("make", "infinipipe", "python", "torchrun", "srun", "pip")


def commands(document: Path) -> list[str]:
    """The lines of a document's ``sh`` blocks, continued lines joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


WITH_COMMANDS = [document for document in DOCUMENTS if commands(document)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the commands read, with a small model and a few lengths."""
    path = tmp_path_factory.mktemp("docs")
    for name in ("examples", "benchmarks", "Makefile", "pyproject.toml", "constraints.txt"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, path / name)
    LlamaConfig(**SMALL_MODEL).save_pretrained(path / "model")
    (path / "lengths.txt").write_text("100\n20\n30\n5\n")
    return path


def execute(words: list[str], folder: Path, seconds: float = 200) -> subprocess.CompletedProcess[str]:
    """Run a command with this environment's programs in front."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment = outer | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def shorten(words: list[str], folder: Path) -> list[list[str]]:
    """What is run in a test for a documented command: itself, or the same with less to do."""
    program, *arguments = words
    if program == "make":
        return [[*DRY_MAKE, *arguments]]
    if "config.yaml" in arguments:
        return []  # tests/train/test_training.py runs these, on a configuration of its own
    if program == "infinipipe" and arguments[0] == "profile":
        return [[*words, *SMALL_PROFILE.split()]]
    if program == "infinipipe" and arguments[0] == "timeline" and arguments[1].startswith("runs/"):
        for name in (a for a in arguments if a.startswith("runs/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "step.json", folder / name)
    return [words]


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=[document.name for document in WITH_COMMANDS])
def test_the_commands_of_a_document_run(document: Path, folder: Path) -> None:
    for command in commands(document):
        words = shlex.split(command)
        assert words[0] in PROGRAMS, f"{document.name}: {command} names a program that no test knows"
        for run in shorten(words, folder):
            finished = execute(run, folder)
            assert finished.returncode == 0, f"{document.name}: {command}\n{finished.stdout}\n{finished.stderr}"


def test_no_command_stands_outside_of_a_block() -> None:
    for document in DOCUMENTS:
        text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
        for line in text.splitlines():
            assert not re.match(rf"    ({'|'.join(PROGRAMS)}) ", line), f"{document.name}: {line}"


def test_make_train_runs_the_example_and_leaves_what_the_readme_says(tmp_path: Path) -> None:
    """The command of ``make train``, on a few files and for a few steps."""
    recipe = execute([*DRY_MAKE, "train"], ROOT).stdout
    words = shlex.split(recipe.strip().splitlines()[-1])
    assert words[0].endswith("/infinipipe")
    less = {
        "data.files": '["{stdlib}/json/*.py", "{stdlib}/email/*.py", "{stdlib}/argparse.py"]',
        "data.cache": str(tmp_path / "cache"),
        "tokenizer.path": "",
        "train.output": str(tmp_path / "run"),
        "train.stop_after": "2",
        "train.timeline_steps": "[2]",
        "train.evaluate_sequences": "2",
    }
    options = [text for name, value in less.items() for text in (f"--{name}", value)]
    finished = execute(["infinipipe", *words[1:], *options], ROOT)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "unigram entropy" in finished.stdout
    run = tmp_path / "run"
    assert json.loads((run / "checkpoint" / "config.json").read_text())["model_type"] == "llama"
    assert (run / "timelines" / "step-000002.svg").read_text().startswith("<svg")
    assert (run / "tensorboard").is_dir()
