"""What README.md and docs/ show runs: every command, every piece of Python, every file and every patch, in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig

from infinipipe.cli.train import read_settings
from infinipipe.model import backends
from infinipipe.plan import schedules
from infinipipe.planner import registry

from .documents import DOCUMENTS, ROOT, Block, blocks, prose

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
PATCHED = "src"
"""Where in the folder a document's patch finds the package."""
PROGRAMS = ("make", "infinipipe", "python", "torchrun", "srun", "pip")


WITH_BLOCKS = [document for document in DOCUMENTS if blocks(document)]


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


@pytest.fixture
def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder as that in which a document is read: what its Python imports and registers is gone afterwards."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for module, name in ((schedules, "_SCHEDULES"), (registry, "_PLANNERS"), (backends, "_BACKENDS")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
            del sys.modules[name]
    shutil.rmtree(folder / PATCHED, ignore_errors=True)


def execute(words: list[str], folder: Path, seconds: float = 200) -> subprocess.CompletedProcess[str]:
    """Run a command with this environment's programs, and a patched package, in front."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment = outer | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder / PATCHED),
    }
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


def run_commands(block: Block, folder: Path) -> None:
    for command in block.commands:
        words = shlex.split(command)
        assert words[0] in PROGRAMS, f"{command} names a program that no test knows"
        for run in shorten(words, folder):
            finished = execute(run, folder)
            assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"


def apply_patch(block: Block, folder: Path) -> None:
    """Change a copy of the package, which commands find from then on."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "infinipipe", folder / PATCHED / "infinipipe", ignore=ignored)
    command = ["git", "apply", "-C1", "-"]
    done = subprocess.run(command, cwd=folder, input=block.text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", WITH_BLOCKS, ids=[document.stem for document in WITH_BLOCKS])
def test_what_a_document_shows_runs(document: Path, reader: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(document):
        if block.file:
            (reader / block.file).write_text(block.text)
        if block.file.endswith(".toml"):
            read_settings([block.file])
        elif block.language == "sh":
            run_commands(block, reader)
        elif block.language == "diff":
            apply_patch(block, reader)
        elif block.language == "python" and not block.file:
            at_its_line = "\n" * (block.line - 1) + block.text
            exec(compile(at_its_line, str(document), "exec"), names)


def test_no_code_stands_outside_of_a_block() -> None:
    for document in DOCUMENTS:
        for line in prose(document).splitlines():
            assert not re.match(rf"    ({'|'.join(PROGRAMS)}|from|import) ", line), f"{document.name}: {line}"


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
