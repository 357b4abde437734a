"""A wheel holds the package and nothing else, and works where there is no source tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.train.conftest import write_corpus

ROOT = Path(__file__).parents[2]
PACKAGE = "infinipipe"
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def execute(*words: str | Path, folder: Path) -> str:
    """What a command prints that must succeed, in a folder and without this process's settings for Python."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources: a build leaves files beside them, and takes up what an earlier one has left.

    Tests lie beside them as in the repository; the wheel must not take them up.
    """
    folder = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "tests" / "package", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    execute(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "dist", folder, folder=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment that has the wheel, and its dependencies from this environment.

    This environment's own installation of the package stays out of it: files of paths, which an editable one is made
    of, are read in an environment's own folder only.
    """
    folder = tmp_path_factory.mktemp("installed") / "environment"
    venv.create(folder, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    Path(sysconfig.get_path("purelib", "venv", paths), "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    bin_folder = Path(sysconfig.get_path("scripts", "venv", paths))
    execute(*PIP, "--python", bin_folder / "python", "install", "--no-deps", "--no-index", wheel, folder=folder)
    return bin_folder


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in (source / PACKAGE).rglob("*") if path.is_file()}
    names = set(zipfile.ZipFile(wheel).namelist())
    described = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - described == {name for name in files if "__pycache__" not in name}
    assert any(name.endswith("/LICENSE") for name in described)


def test_the_installed_package_is_the_wheels(programs: Path, tmp_path: Path) -> None:
    code = f"import sys, {PACKAGE}; print({PACKAGE}.__file__, *sys.path, sep='\\n')"
    module, *paths = execute(programs / "python", "-c", code, folder=tmp_path).splitlines()
    assert Path(module).is_relative_to(programs.parent)
    assert not {str(ROOT), str(ROOT / "src")} & set(paths)


def test_it_plans_simulates_and_draws(programs: Path, tmp_path: Path) -> None:
    command = programs / PACKAGE
    (tmp_path / "lengths.txt").write_text("60000\n9000\n400\n1200\n")
    options = ("7b-a100", "--memory_budget", "40")
    execute(command, "plan", "lengths.txt", *options, "--stages", "4", "--output", "plan.json", folder=tmp_path)
    execute(command, "simulate", "plan.json", *options, "--output", "step.json", folder=tmp_path)
    for suffix, start in (("html", b"<!doctype html>"), ("svg", b"<svg "), ("png", b"\x89PNG")):
        execute(command, "timeline", "step.json", "--output", f"step.{suffix}", folder=tmp_path)
        assert (tmp_path / f"step.{suffix}").read_bytes().startswith(start)


def test_it_trains(programs: Path, tmp_path: Path) -> None:
    config = write_corpus(tmp_path)
    options = ("--train.steps", "2", "--train.timeline_steps", "[2]")
    execute(programs / PACKAGE, "train", config, *options, folder=tmp_path)
    run = tmp_path / "run"
    assert (run / "timelines" / "step-000002.svg").read_text().startswith("<svg")
    assert json.loads((run / "checkpoint" / "config.json").read_text())["model_type"] == "llama"
