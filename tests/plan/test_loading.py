"""A user's functions from Python files: once for every state of the file, and every fault in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinipipe.plan import PlanError
from infinipipe.plan.loading import load_function


def test_a_file_is_run_once_until_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("runs = []\ndef count():\n    runs.append(1)\n    return len(runs)\n")
    assert [load_function(f"{path}:count", "schedule")() for _ in range(3)] == [1, 2, 3]
    path.write_text("def count():\n    return 'changed'\n")
    os.utime(path, ns=(1, 1))
    assert load_function(f"{path}:count", "schedule")() == "changed"


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            f"@dataclass\nclass Own:\n    value: str = {name!r}\ndef get():\n    return Own().value\n"
        )
    assert [load_function(f"{tmp_path / name / 'mine.py'}:get", "planner")() for name in ("a", "b")] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "reference", "message"),
    [
        (None, "{path}:f", "cannot load the planner file .*; there is no such file"),
        ("", "{folder}/text.txt:f", "cannot load the planner file .*; its name must end in .py"),
        ("x = 1\n1 / 0\n", "{path}:f", "fails when loaded at line 2: ZeroDivisionError: division by zero"),
        ("def f(:\n", "{path}:f", "fails when loaded at line 1: SyntaxError"),
        ("import not_there_at_all\n", "{path}:f", "fails when loaded at line 1: ModuleNotFoundError"),
        ("", "{path}:f", "the planner file .* has no function 'f'"),
        ("", "{path}:", "the planner file .* has no function ''"),
        ("f = 3\n", "{path}:f", "'f' in the planner file .* is of type int, not a function"),
    ],
)
def test_what_cannot_be_loaded_is_named(content: str | None, reference: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    (tmp_path / "text.txt").write_text("f")
    if content is not None:
        path.write_text(content)
    with pytest.raises(PlanError, match=message):
        load_function(reference.format(path=path, folder=tmp_path), "planner")


def test_what_a_function_raises_is_said_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from infinipipe.plan import PlanError\n"
        "def plain():\n    raise PlanError('no room')\n"
        "def other():\n    {}['x']\n"
        "def inner():\n    raise OSError('two\\nlines')\n"
    )
    with pytest.raises(PlanError, match="^no room$"):
        load_function(f"{path}:plain", "planner")()
    with pytest.raises(PlanError, match=f"^the planner {path}:other fails at line 5: KeyError: 'x'$"):
        load_function(f"{path}:other", "planner")()
    with pytest.raises(PlanError, match="fails at line 7: OSError: two lines$"):
        load_function(f"{path}:inner", "planner")()
    with pytest.raises(PlanError, match=r"^the planner .*:plain fails: TypeError: .*plain\(\) takes 0"):
        load_function(f"{path}:plain", "planner")(1)
