"""``infinipipe plan``: lengths from files, the summary, the comparison, errors in words."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from infinipipe.cli.plan import PlanOptions, read_cost, run
from infinipipe.cost import AnalyticCost, save_cost
from infinipipe.cost.presets import preset
from infinipipe.data import DataSettings, TokenizerSettings, open_corpus
from infinipipe.plan import PlanError, load
from infinipipe.planner import plan_step
from infinipipe.planner.lengths import read_lengths
from infinipipe.train.settings import PlanSettings


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, [9000, 4000, 300, 200, 100, 50] * 4)) + "\n")
    return path


def write_config(folder: Path, vocab_size: int) -> Path:
    """A Hugging Face configuration of four layers."""
    path = folder / "config.json"
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size} | sizes))
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
    config = write_config(tmp_path, vocab_size=100)
    assert run([str(lengths_file), str(config), "--stages", "2", "--max_slices", "2"]) == 0


def test_a_chunk_of_a_configuration_costs_what_it_does_in_training(tmp_path: Path) -> None:
    config = str(write_config(tmp_path, vocab_size=100))
    seconds = PlanSettings.chunk_seconds
    assert f"configuration {seconds:g}, as in training" in (PlanOptions.__doc__ or "")
    for given, expected in ((None, seconds), (0.0, 0.0)):
        cost = read_cost(PlanOptions("lengths.txt", config, chunk_seconds=given), [100])
        assert isinstance(cost, AnalyticCost)
        assert cost.chunk_seconds() == pytest.approx(expected)


def test_options_that_a_cost_model_does_not_heed_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "cost.json")
    save_cost(preset("7b-a100", 2, sequence_parallel=4), path)
    agreeing = PlanOptions("lengths.txt", path, stages=2, sequence_parallel=4)
    assert read_cost(agreeing, [100]) == read_cost(PlanOptions("lengths.txt", path), [100])
    with pytest.raises(ValueError, match=r"stages is 3, but .* is of stages 2; omit --stages, or profile for 3"):
        read_cost(PlanOptions("lengths.txt", path, stages=3), [100])
    with pytest.raises(ValueError, match=r"sequence_parallel is 8, but .* is of sequence_parallel 4"):
        read_cost(PlanOptions("lengths.txt", path, sequence_parallel=8), [100])
    with pytest.raises(ValueError, match=r"chunk_seconds is 0\.0, but the cost file"):
        read_cost(PlanOptions("lengths.txt", path, chunk_seconds=0.0), [100])
    for model in (path, "7b-a100"):
        with pytest.raises(ValueError, match=r"flops_per_second is .* omit --flops_per_second"):
            read_cost(PlanOptions("lengths.txt", model, flops_per_second=1e12), [100])


def test_more_recomputed_layers_than_a_stage_has_are_all(lengths_file: Path, tmp_path: Path) -> None:
    for recompute in ("99", "all"):
        arguments = [str(lengths_file), "7b-a100", "--max_slices", "2", "--planner", "packed-1f1b"]
        assert run([*arguments, "--recompute", recompute, "--output", str(tmp_path / f"{recompute}.json")]) == 0
    assert load(tmp_path / "99.json") == load(tmp_path / "all.json")


@pytest.mark.parametrize(
    ("lengths", "model", "output"),
    [
        ("lengths.txt", "7b-a100", "lengths.txt"),
        ("corpus", "7b-a100", "corpus/index.npz"),
        ("lengths.txt", "cost.json", "folder/../cost.json"),
        ("lengths.txt", "model", "model/config.json"),
        ("lengths.txt", "7b-a100", "order.py"),
    ],
)
def test_what_is_read_is_not_written(lengths: str, model: str, output: str) -> None:
    with pytest.raises(ValueError, match=r"output .* is a file that is read; name another file"):
        run([lengths, model, "--schedule", "order.py:order", "--output", output])


def test_stages_of_a_configuration_are_balanced_for_the_lengths(lengths_file: Path, tmp_path: Path) -> None:
    config, plan = write_config(tmp_path, vocab_size=4000), str(tmp_path / "plan.json")
    for context, layers in (("9000", (2, 2)), ("50", (3, 1))):
        arguments = [str(lengths_file), str(config), "--stages", "2", "--max_slices", "2", "--context", context]
        assert run([*arguments, "--output", plan]) == 0
        assert load(plan).stage_layers == layers


def test_errors_are_in_words(lengths_file: Path) -> None:
    with pytest.raises(ValueError, match="neither a file nor a preset"):
        run([str(lengths_file), "8b-b200"])
    with pytest.raises(ValueError, match=r"needs about .* at stage"):
        run([str(lengths_file), "7b-a100", "--memory_budget", "0.5"])
    with pytest.raises(ValueError, match="memory_budget"):
        run([str(lengths_file), "7b-a100", "--memory_budget", "-1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory_budget", "1e300"], "memory_budget is 1e"),
        (["--num_slices", "1000000000"], "num_slices is 1000000000; it must be at most"),
        (["--max_slices", "1000000000"], "max_slices is 1000000000; it must be at most"),
        (["--chunk_seconds", "-5"], "chunk_seconds is -5.0"),
        (["--chunk_seconds", "1e308"], "chunk_seconds is 1e"),
        (["--flops_per_second", "0"], "flops_per_second is 0.0"),
        (["--batch", "2", "--seed", "-1"], "seed is -1"),
        (["--recompute", "some"], "Expected one of 'auto', 'none', 'all' or int. Got value: some"),
        (
            ["--max_slices", "2", "--output", "missing/plan.json"],
            "there is no folder 'missing' for output missing/plan.json; make it first",
        ),
    ],
)
def test_impossible_options_are_errors_in_words(lengths_file: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run([str(lengths_file), "7b-a100", *arguments])


def test_a_plan_is_not_left_half_written(lengths_file: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="is a folder; name a file"):
        run([str(lengths_file), "7b-a100", "--max_slices", "2", "--output", str(tmp_path / "folder")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "lengths.txt"]


def test_sequences_beyond_counting_are_refused() -> None:
    with pytest.raises(PlanError, match="more than 1099511627776 tokens"):
        plan_step([5, 10**400], preset("7b-a100", 2))


def test_lengths_come_from_a_tokenized_corpus(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "two words"), ("c", "x")):
        (tmp_path / f"{name}.txt").write_text(text)
    data = DataSettings(files=[str(tmp_path / "*.txt")], cache=str(tmp_path / "cache"), held_out=0)
    corpus = open_corpus(data, TokenizerSettings(vocab_size=257))
    (folder,) = (tmp_path / "cache").glob("tokens-*")
    assert read_lengths(folder) == corpus.train.lengths.tolist()


def test_lengths_come_from_many_files(tmp_path: Path) -> None:
    (tmp_path / "windows.txt").write_bytes("\ufeff5\r\n6\r\n\r\n".encode())
    assert read_lengths(tmp_path / "windows.txt") == [5, 6]
    np.save(tmp_path / "lengths.npy", np.array([5, 6]))
    assert read_lengths(tmp_path / "lengths.npy") == [5, 6]
    (tmp_path / "lengths.json").write_text("[1, 2]")
    assert read_lengths(tmp_path / "lengths.json") == [1, 2]
    for content, message in (("1\nx\n", "line 2: 'x'"), ("0\n", "at least 1"), ("", "at least one length")):
        (tmp_path / "bad.txt").write_text(content)
        with pytest.raises(PlanError, match=message):
            read_lengths(tmp_path / "bad.txt")
    for missing in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(PlanError, match="cannot read lengths"):
            read_lengths(missing)


def test_broken_files_of_lengths_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "archive.npz", np.array([1]))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "empty.npy").touch()
    (tmp_path / "text.npy").write_text("text")
    (tmp_path / "index.npz").write_text("text")
    for broken in ("archive.npy", "object.npy", "empty.npy", "text.npy", "."):
        with pytest.raises(PlanError, match=r"(index|\.np[yz]) is not a NumPy file of numbers"):
            read_lengths(tmp_path / broken)
    for content in ("[" * 100_000, "[" + "9" * 5000 + "]"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(PlanError, match=r"bad\.json is not JSON"):
            read_lengths(tmp_path / "bad.json")


def test_planners_without_a_pipeline_pay_for_what_they_gather_on_the_links_at_hand(
    lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    slow = preset("7b-a100", 4)
    files = {}
    for name, factor in (("fast", 1.0), ("slow", 50.0)):
        link = dataclasses.replace(slow.all_to_all, seconds_per_byte=slow.all_to_all.seconds_per_byte * factor)
        files[name] = tmp_path / f"{name}.json"
        save_cost(dataclasses.replace(slow, all_to_all=link), files[name])
    seconds = {}
    for name, file in files.items():
        assert run([str(lengths_file), str(file), "--max_slices", "4", "--compare", "true"]) == 0
        printed = capsys.readouterr().out
        row = next(line for line in printed.splitlines() if line.startswith("ulysses-zero3"))
        seconds[name] = float(row.split()[1])
        assert "a micro-batch those without one" in printed
    assert seconds["slow"] > 5 * seconds["fast"]


def test_a_pipeline_that_keeps_its_parameters_is_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = Path(__file__).parents[2] / "examples" / "lengths.txt"
    arguments = [str(lengths), "13b-a100", "--stages", "4", "--batch", "256", "--context", "96000"]
    assert run([*arguments, "--memory_budget", "67", "--compare", "true"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("planning for 32 devices: 1 replica of 4 stages, 8 devices each")
    order = [line.split()[0] for line in printed if line[:6] in ("elasti", "flexsp", "ulysse")]
    assert order.index("elastic") < order.index("flexsp")
    assert order.index("elastic-paper") < order.index("ulysses-zero3")
