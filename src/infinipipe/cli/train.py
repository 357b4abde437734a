"""``infinipipe train CONFIG [overrides]``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from infinipipe.cli.words import in_words, setting_names
from infinipipe.settings import SettingError
from infinipipe.train.environment import ProcessEnvironment, read_environment, set_rendezvous
from infinipipe.train.errors import leave, run_reported
from infinipipe.train.interrupt import STOPPED
from infinipipe.train.launch import USERS_ERROR, launch
from infinipipe.train.lock import OutputLock
from infinipipe.train.settings import Settings

MODES = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
"""How a configuration file is read, by its suffix."""


def run(arguments: Sequence[str]) -> int:
    """Train: start workers on this machine, or be one of those that torchrun or SLURM has started.

    Returns 0 for a finished run, 3 for one that was asked to stop and can be resumed, 1 for a failure, 130 if interrupted at once.
    """
    settings, text = read_settings(arguments)
    process = read_environment(os.environ)
    if process is not None:
        code = run_reported(lambda: _work(settings, text, process), process.rank)
        return code if code in (0, STOPPED) else leave(code)
    command = [sys.executable, "-m", "infinipipe.cli.main", "train", *arguments]
    output, parallel = Path(settings.train.output), settings.parallel
    is_new = not output.exists()
    lock = OutputLock(output)
    try:
        code = launch(
            command, parallel.num_processes, output / "logs", name=parallel.name_of, inherited=[lock.descriptor]
        )
        if code == USERS_ERROR and is_new:
            _leave_nothing(output)
        return code
    finally:
        lock.release()


def _leave_nothing(output: Path) -> None:
    """Remove the folder of a run that was refused before it wrote anything but logs."""
    if {path.name for path in output.iterdir()} <= {"lock", "logs"}:
        shutil.rmtree(output)


def _work(settings: Settings, text: str, process: ProcessEnvironment) -> int:
    if process.world_size != settings.parallel.num_processes:
        raise SettingError(
            f"{settings.parallel.describe()}, but {process.launcher} has started {process.world_size}; change one of them"
        )
    set_rendezvous(os.environ, process)
    from infinipipe.train.loop import train

    return train(settings, process, settings_text=text)


def settings_parser(mode: str = "yaml") -> ArgumentParser:
    """The parser of a configuration file in ``mode`` (``yaml``, ``json`` or ``toml``) and of overrides."""
    parser = ArgumentParser(
        prog="infinipipe train",
        usage="infinipipe train CONFIG [--section.setting VALUE ...]",
        description="Train as CONFIG, a TOML, YAML or JSON file, says. Every setting can be overridden on the command line.",
        parser_mode=mode,
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help=argparse.SUPPRESS)
    parser.add_class_arguments(Settings)
    return parser


def _mode_of(path: Path) -> str:
    """How a configuration file is read."""
    if path.suffix.lower() not in MODES:
        suffixes = ", ".join(MODES)
        raise SettingError(
            f"the suffix of a configuration file decides how it is read: one of {suffixes}; {str(path)!r} has "
            f"{'none of them' if path.suffix else 'no suffix'}; rename it"
        )
    return MODES[path.suffix.lower()]


def read_settings(arguments: Sequence[str]) -> tuple[Settings, str]:
    """Settings from ``CONFIG [overrides]``, and all of them as YAML. Raises ``SettingError`` naming what is wrong."""
    given = list(arguments)
    asks_help = any(argument in ("-h", "--help") for argument in given)
    if given and not given[0].startswith("-"):
        given.insert(0, "--config")
    elif not asks_help:
        raise SettingError("name a configuration file first: infinipipe train CONFIG [--section.setting VALUE ...]")
    path = Path(given[1]) if given[0] == "--config" else None
    if path is not None and not path.is_file():
        raise SettingError(f"there is no configuration file {str(path)!r}")
    parser = settings_parser("yaml" if path is None else _mode_of(path))
    try:
        parsed = parser.parse_args(given)
        settings = parser.instantiate(parsed)
    except argparse.ArgumentError as error:
        raise SettingError(in_words(str(error), list(setting_names(Settings)))) from None
    parsed.pop("config", None)
    fields = {name: settings[name] for name in Settings.__dataclass_fields__}
    return Settings(**fields), settings_parser("yaml").dump(parsed, skip_validation=True)
