"""``infinipipe plan``: lengths from files, the summary, the comparison, errors in words."""

from pathlib import Path

import numpy as np
import pytest

from infinipipe.cli.plan import run
from infinipipe.cost import save_cost
from infinipipe.cost.presets import preset
from infinipipe.plan import PlanError, load
from infinipipe.planner.lengths import read_lengths


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, [9000, 4000, 300, 200, 100, 50] * 4)) + "\n")
    return path


def test_plans_summarises_and_writes(
    lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    output = tmp_path / "plan.json"
    arguments = [str(lengths_file), "7b-a100", "--memory_budget", "40", "--max_slices", "4", "--output", str(output)]
    assert run([*arguments, "--compare", "true", "--batch", "12", "--context", "8000"]) == 0
    printed = capsys.readouterr().out
    for word in ("split", "hybrid", "bubble", "recompute", "of the budget", "elastic-paper", "flexsp", "no pipeline"):
        assert word in printed
    plan = load(output)
    plan.validate()
    assert len(plan.lengths) == 12
    assert max(plan.lengths) <= 8000


def test_cost_files_and_configurations_are_models_too(lengths_file: Path, tmp_path: Path) -> None:
    cost_file = tmp_path / "cost.json"
    save_cost(preset("7b-a100", 2), cost_file)
    assert run([str(lengths_file), str(cost_file), "--max_slices", "2"]) == 0
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, '
        '"num_attention_heads": 4, "vocab_size": 100}'
    )
    assert run([str(lengths_file), str(config), "--stages", "2", "--max_slices", "2"]) == 0


def test_errors_are_in_words(lengths_file: Path) -> None:
    with pytest.raises(ValueError, match="neither a file nor a preset"):
        run([str(lengths_file), "8b-b200"])
    with pytest.raises(ValueError, match=r"needs at least .* at stage"):
        run([str(lengths_file), "7b-a100", "--memory_budget", "0.5"])
    with pytest.raises(ValueError, match="memory_budget"):
        run([str(lengths_file), "7b-a100", "--memory_budget", "-1"])


def test_lengths_come_from_many_files(tmp_path: Path) -> None:
    np.save(tmp_path / "ends.npy", np.array([3, 10, 11]))
    assert read_lengths(tmp_path) == [3, 7, 1]
    np.save(tmp_path / "lengths.npy", np.array([5, 6]))
    assert read_lengths(tmp_path / "lengths.npy") == [5, 6]
    (tmp_path / "lengths.json").write_text("[1, 2]")
    assert read_lengths(tmp_path / "lengths.json") == [1, 2]
    for content, problem in (("1\nx\n", "line 2: 'x'"), ("0\n", "at least 1"), ("", "at least one length")):
        (tmp_path / "bad.txt").write_text(content)
        with pytest.raises(PlanError, match=problem):
            read_lengths(tmp_path / "bad.txt")
    with pytest.raises(PlanError, match="cannot read lengths"):
        read_lengths(tmp_path / "none.txt")
