"""Configuration files and overrides: what is read, and every mistake in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinipipe.cli.main import main
from infinipipe.cli.train import read_settings
from infinipipe.train.settings import Settings

TOML = """
[model.config]
model_type = "llama"
hidden_size = 64

[data]
files = ["a.txt"]
sequences_per_step = 3

[parallel]
stages = 2
"""
YAML = """
model: {config: {model_type: llama, hidden_size: 64}}
data: {files: [a.txt], sequences_per_step: 3}
parallel: {stages: 2}
"""


JSON = """{
\t"model": {"config": {"model_type": "llama", "hidden_size": 64}},
\t"data": {"files": ["a.txt"], "sequences_per_step": 3},
\t"parallel": {"stages": 2}
}
"""
FORMS = {"toml": TOML, "yaml": YAML, "json": JSON}


@pytest.fixture(params=FORMS)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"config.{request.param}"
    path.write_text(FORMS[request.param])
    return path


def read(*arguments: object) -> Settings:
    return read_settings([str(argument) for argument in arguments])[0]


def test_file_and_defaults(config: Path) -> None:
    settings = read(config)
    assert settings.model.config == {"model_type": "llama", "hidden_size": 64}
    assert settings.data.files == ["a.txt"]
    assert (settings.data.sequences_per_step, settings.parallel.stages, settings.parallel.num_processes) == (3, 2, 2)
    assert settings.optimizer.betas == (0.9, 0.95)


def test_overrides_replace_the_file(config: Path) -> None:
    settings = read(
        config, "--plan.max_slices", "16", "--plan.recompute=2", "--parallel.stage_layers", "[3, 1]",
        "--data.files+", "b.txt", "--model.config.hidden_size", "32", "--optimizer.learning_rate", "1e-4",
    )  # fmt: skip
    assert (settings.plan.max_slices, settings.plan.recompute) == (16, 2)
    assert settings.parallel.stage_layers == [3, 1]
    assert settings.data.files == ["a.txt", "b.txt"]
    assert settings.model.config["hidden_size"] == 32
    assert settings.optimizer.learning_rate == 1e-4


SOURCES = """
[model.config]
model_type = "llama"

[data.sources.code]
files = ["a/*.py"]
weight = 3.0

[data.sources.chats]
dataset = "some/name"
weight = 1
loss_on = "last"

[data.template_options]
enable_thinking = false
"""


@pytest.fixture
def several(tmp_path: Path) -> Path:
    path = tmp_path / "several.toml"
    path.write_text(SOURCES)
    return path


def test_sources_are_tables_by_name_and_what_they_leave_out_is_that_of_all(several: Path, tmp_path: Path) -> None:
    settings, text = read_settings([str(several), "--data.sources.code.weight", "5", "--data.text_field", "body"])
    code, chats = settings.data.of_sources().values()
    assert settings.data.weights == (5, 1)
    assert (code.files, code.loss_on, code.text_field) == (["a/*.py"], "assistant", "body")
    assert (chats.dataset, chats.loss_on, chats.text_field) == ("some/name", "last", "body")
    assert chats.template_options == {"enable_thinking": False}
    kept = tmp_path / "kept.yaml"
    kept.write_text(text)
    assert read(kept) == settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["--data.sources.code.nonsense", "5"], "data.sources: in one of them, there is no setting nonsense"),
        (["--data.sources.code.weigt", "5"], "in one of them, there is no setting weigt; the nearest is weight"),
        (
            ["--data.sources.code.loss_on", "none"],
            "data.sources: in one of them, loss_on: Expected one of 'assistant', 'last', 'all'. Got value: none",
        ),
        (["--data.files", '["x"]'], "data.files and data.sources are both given; put all of them under data.sources"),
        (["--data.sources.more.files", '["x"]'], "data.sources.more has no weight, but others have"),
    ],
)
def test_mistakes_in_sources_are_one_sentence(
    several: Path, override: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(several), *override]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_kept_settings_read_back_equal(config: Path, tmp_path: Path) -> None:
    settings, text = read_settings([str(config), "--plan.recompute", "all"])
    kept = tmp_path / "kept.yaml"
    kept.write_text(text)
    assert read(kept) == settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["--plan.max_slicez", "3"], "there is no setting plan.max_slicez; the nearest is plan.max_slices"),
        (["--plam.max_slices=3"], "there is no setting plam.max_slices; the nearest is plan.max_slices"),
        (["--plan.stages", "3"], "there is no setting plan.stages; the nearest is parallel.stages"),
        (["--optimzer", "3"], "there is no setting optimzer; the nearest is optimizer"),
        (["--plan.max_slices", "many"], "plan.max_slices: Expected a int. Got value: many"),
        (["--plan.recompute", "some"], "plan.recompute: Expected one of"),
        (["--model.dtype", "float8"], "model.dtype: Expected"),
        (["--plan.planner", "elastik"], "plan.planner: there is no planner 'elastik'; use one of chunkflow, elastic,"),
        (["--plan.planner", "absent.py:plan"], "plan.planner: cannot load the planner file 'absent.py'"),
        (["--plan.schedule", "2f2b"], "plan.schedule: there is no schedule '2f2b'"),
        (["--plan.max_slices", "0"], "plan.max_slices is 0; it must be at least 1"),
        (["--plan.token_capacity", "0"], "plan.token_capacity is 0; it must be at least 1; leave it out for no limit"),
        (["--plan.memory_budget", "-1"], "plan.memory_budget is -1 GiB; it must be above 0"),
        (["--data.held_out", "0.9"], "data.held_out must be at most 0.5, not 0.9"),
        (["--data.held_out", "nan"], "data.held_out: Expected a float. Got value: nan"),
        (["--optimizer.learning_rate", "0"], "optimizer.learning_rate must be above 0, not 0"),
        (["--optimizer.betas", "[0.9, 1.5]"], "optimizer.betas must be at most"),
        (["--data.files", "[]"], "data.files is empty"),
        (["--model.weights", "load"], "there is no model.path to load from"),
        (["--train.output", ""], "train.output is empty"),
    ],
)
def test_mistakes_are_one_sentence(
    config: Path, override: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), *override]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("infinipipe: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.toml", None, "there is no configuration file"),
        ("a.toml", b"a = [", "the configuration file is malformed"),
        ("a.yaml", b"{a: [", "the configuration file is malformed"),
        ("a.json", b'{"a": ', "the configuration file is malformed"),
        ("a.toml", b"\xff", "can't decode byte"),
        ("a.txt", TOML.encode(), "how it is read: one of .toml, .yaml, .yml, .json; "),
        ("a.TXT", TOML.encode(), "a.TXT' has none of them; rename it"),
        ("a", YAML.encode(), "a' has no suffix; rename it"),
        ("a.toml", b"[plan]\nmax_slicez = 3\n", "no setting plan.max_slicez; the nearest is plan.max_slices"),
        ("a.yaml", b"plan: {max_slicez: 3}", "no setting plan.max_slicez; the nearest is plan.max_slices"),
        ("a.json", b'{"plan": {"max_slicez": 3}}', "no setting plan.max_slicez; the nearest is plan.max_slices"),
        ("a.toml", b"[optimzer]\nbetas = [0, 0]\n", "no setting optimzer.betas; the nearest is optimizer.betas"),
        ("a.toml", b'[data]\nfiles = ["x"]\n', "model needs a path, or a config with a model_type"),
        ("a.toml", b'[model.config]\nmodel_type = "llama"\n', "data.files is empty"),
    ],
)
def test_bad_files_are_one_sentence(
    tmp_path: Path, name: str, content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(["train", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_missing_configuration_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert "name a configuration file first" in capsys.readouterr().err
