"""What the command makes of what goes wrong."""

from __future__ import annotations

import importlib

import pytest

from infinipipe.cli.main import main


def test_an_interrupt_while_a_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "infinipipe: interrupted\n"
