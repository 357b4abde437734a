"""The commands of the documentation run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from transformers import LlamaConfig

from infinipipe.cli.main import main

DOCUMENT = Path(__file__).parents[2] / "docs" / "profiling.md"
SMALL = "--longest 128 --capacity 64 --smallest 16 --max_slices 4 --plans 8 --repeats 1"


def test_the_commands_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    ).save_pretrained("model")
    Path("lengths.txt").write_text("\n".join(map(str, [100, 20, 30, 5])) + "\n")
    lines = [line.strip() for line in DOCUMENT.read_text().splitlines() if line.startswith("    infinipipe ")]
    assert len(lines) == 5
    for line in lines:
        command = shlex.split(line)[1:]
        assert main(command + (SMALL.split() if command[0] == "profile" else [])) == 0, line
    assert {"cost.json", "plan.json", "step.json", "rehearsed.json", "step.html"} <= {
        p.name for p in tmp_path.iterdir()
    }
