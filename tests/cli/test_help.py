"""Help is there at once, and the reference of settings is what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infinipipe.cli.main import main
from infinipipe.cli.reference import render

REFERENCE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_reference_is_current() -> None:
    assert REFERENCE.read_text() == render(), "run: python -m infinipipe.cli.reference docs/configuration.md"


def test_help_lists_commands_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "train" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "infinipipe train CONFIG" in shown
    assert "--plan.max_slices" in shown


def test_an_interruption_ends_in_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("infinipipe.cli.plan.run", interrupted)
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "infinipipe: interrupted\n"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    program = f"""
import sys
from infinipipe.cli.main import main
try:
    main({arguments})
except SystemExit:
    pass
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["trian"])
    assert stop.value.code == 2
    assert "'trian'" in capsys.readouterr().err
