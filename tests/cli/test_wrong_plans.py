"""Wrong plans, schedules, planners, cost files and settings of ``plan``: one sentence each, exit code 2, nothing written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from infinipipe.cli.main import main
from infinipipe.cost import preset, save_cost

CODE = """
from infinipipe.plan import Backward, Forward


def _counts(pipelines):
    return range(sum(map(len, pipelines)))


def forgets(pipelines, placement, warmup):
    n = _counts(pipelines)
    return [[*map(Forward, n), *map(Backward, list(reversed(n))[:-1])]] * placement.num_stages


def repeats(pipelines, placement, warmup):
    n = _counts(pipelines)
    return [[*map(Forward, n), Forward(0), *map(Backward, reversed(n))]] * placement.num_stages


def in_forward_order(pipelines, placement, warmup):
    n = _counts(pipelines)
    return [[*map(Forward, n), *map(Backward, n)]] * placement.num_stages


def raises(pipelines, placement, warmup):
    return 1 / 0


def returns_text(pipelines, placement, warmup):
    return "F0 B0"


def returns_nothing(pipelines, placement, warmup):
    return None


def of_one_stage(pipelines, placement, warmup):
    return [[]]


def of_other_chunks(pipelines, placement, warmup):
    return [[Forward(10**6), Backward(10**6)]] * placement.num_stages


def backwards_first(pipelines, placement, warmup):
    n = _counts(pipelines)
    return [[*map(Backward, reversed(n)), *map(Forward, n)]] * placement.num_stages


def considers_nothing(search):
    return search.refine_best()


def finds_nothing(search):
    return None
"""
SCHEDULES = {
    "forgets": "stage 0 never runs chunk 0 backward",
    "repeats": "action F0: the chunk went forward already",
    "in_forward_order": "runs backward before a later slice of its sequence",
    "raises": "own.py:raises fails at line 25: ZeroDivisionError",
    "returns_text": "own.py:returns_text must return one list of actions",
    "returns_nothing": "own.py:returns_nothing must return one list of actions",
    "of_one_stage": "for each of the 4 stages",
    "of_other_chunks": "action F1000000: there are",
    "backwards_first": "the activations of the chunk are not there",
    "unknown": "has no function 'unknown'",
}
PLANNERS = {
    "considers_nothing": "the search has considered no draft",
    "finds_nothing": "returns a NoneType; it must return what it has found",
    "raises": "own.py:raises fails",
}
OPTIONS: list[tuple[list[str], str]] = [
    (["--planner", "elastik"], "there is no planner 'elastik'; use one of"),
    (["--schedule", "2f2b"], "there is no schedule '2f2b'; use one of"),
    (
        ["--batch", "100000"],
        "batch is 100000, but lengths.txt has 25 lengths; use at most so many, or omit --batch for all",
    ),
    (["--output", "no/plan.json"], "there is no folder 'no' for output no/plan.json; make it first"),
    (["--output", "lengths.txt"], "output lengths.txt is a file that is read"),
    (["--token_capacity", "10"], "more than the token_capacity of 10; raise token_capacity or the number of slices"),
    (["--memory_budget", "0.5"], "needs about .* GiB per device at stage .*, got 512.000 MiB"),
    (["--dtype", "float32"], "dtype is float32, but the preset 7b-a100 has its own; omit --dtype"),
    (["--stages", "40"], "40 stages are more than the model's 32 layers; use at most 32 stages"),
    (["--time_limit", "0"], "time_limit is 0.0; it must be above 0 seconds"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "lengths.txt").write_text("\n".join(["9000", "4000", "300", "200", "100"] * 5))
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str, model: str = "7b-a100") -> str:
    """What ``plan`` says of those arguments, one sentence, having written nothing."""
    before = {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
    output = [] if "--output" in arguments else ["--output", "plan.json"]
    assert main(["plan", "lengths.txt", model, *arguments, *output]) == 2
    said = capsys.readouterr().err
    assert said.startswith("infinipipe: error: ")
    assert said.count("\n") == 1
    assert {path for path in folder.rglob("*") if "__pycache__" not in path.parts} == before
    return said


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_cannot_run(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, folder, "--schedule", f"own.py:{name}")
    assert SCHEDULES[name] in said
    assert "own.py" in said


@pytest.mark.parametrize("name", PLANNERS)
def test_a_planner_that_makes_no_plan(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert PLANNERS[name] in refused(capsys, folder, "--planner", f"own.py:{name}")


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_an_option_that_cannot_be(
    options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    assert re.search(message, refused(capsys, folder, *options))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, "is not of version 2"),
        ({"states": [1]}, "states has 1 entries for 4 stages"),
        ({"memory": {"layer": 1}}, "memory has no field 'layer_kv'"),
        ({"stage_layers": [8, 8, 8, 9]}, "shape.layers is 32, but stage_layers"),
        ({"fast": True}, "has an unknown field 'fast'"),
    ],
)
def test_a_cost_file_that_is_broken(
    changes: dict[str, Any], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_cost(preset("7b-a100", 4), folder / "cost.json")
    fields = json.loads((folder / "cost.json").read_text())
    (folder / "cost.json").write_text(json.dumps(fields | changes))
    assert message in refused(capsys, folder, model="cost.json")


@pytest.mark.parametrize(
    ("fields", "billions"),
    [
        (
            {
                "model_type": "qwen3_moe",
                "num_hidden_layers": 48,
                "head_dim": 128,
                "num_experts": 128,
                "num_experts_per_tok": 8,
            },
            30.5,
        ),
        ({"model_type": "mixtral"}, 46.7),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    fields: dict[str, Any], billions: float, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text(json.dumps(fields))
    arguments = ["--stages", "4", "--sequence_parallel", "1", "--memory_budget", "72"]
    said = refused(capsys, folder, *arguments, model="config.json")
    needed = float(said.partition("needs about ")[2].partition(" GiB")[0])
    assert needed * 2**30 > 18 * billions * 1e9 / 4, "a stage holds more than a fourth of 18 bytes a parameter"
