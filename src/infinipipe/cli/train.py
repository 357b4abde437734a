"""``infinipipe train CONFIG [overrides]``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from infinipipe.settings import SettingError
from infinipipe.train.environment import ProcessEnvironment, read_environment, set_rendezvous
from infinipipe.train.errors import leave, run_reported
from infinipipe.train.interrupt import STOPPED
from infinipipe.train.launch import launch
from infinipipe.train.lock import OutputLock
from infinipipe.train.settings import Settings


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
    lock = OutputLock(output)
    try:
        return launch(
            command, parallel.num_processes, output / "logs", name=parallel.name_of, inherited=[lock.descriptor]
        )
    finally:
        lock.release()


def _work(settings: Settings, text: str, process: ProcessEnvironment) -> int:
    if process.world_size != settings.parallel.num_processes:
        raise SettingError(
            f"{settings.parallel.describe()}, but {process.launcher} has started {process.world_size}; change one of them"
        )
    set_rendezvous(os.environ, process)
    from infinipipe.train.loop import train

    return train(settings, process, settings_text=text)


def settings_parser(mode: str = "yaml") -> ArgumentParser:
    """The parser of a configuration file in ``mode`` (``yaml`` or ``toml``) and of overrides."""
    parser = ArgumentParser(
        prog="infinipipe train",
        usage="infinipipe train CONFIG [--section.setting VALUE ...]",
        description="Train as CONFIG, a TOML or YAML file, says. Every setting can be overridden on the command line.",
        parser_mode=mode,
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help=argparse.SUPPRESS)
    parser.add_class_arguments(Settings)
    return parser


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
    is_toml = path is not None and path.suffix.lower() == ".toml"
    parser = settings_parser("toml" if is_toml else "yaml")
    try:
        parsed = parser.parse_args(given)
        settings = parser.instantiate(parsed)
    except argparse.ArgumentError as error:
        raise SettingError(_in_words(str(error))) from None
    parsed.pop("config", None)
    fields = {name: settings[name] for name in Settings.__dataclass_fields__}
    return Settings(**fields), settings_parser("yaml").dump(parsed, skip_validation=True)


def _in_words(message: str) -> str:
    """The parser's message as one sentence without Python's spellings."""
    message = " ".join(message.split())
    message = re.sub(r"<class '(\w+)'>", r"\1", message).replace("typing.", "")
    message = re.sub(
        r"Does not validate against any of the Union subtypes Subtypes: \[(.*)\] Errors: .* Given value: (.*)",
        r"Expected one of \1. Got value: \2",
        message,
    )
    message = re.sub(r"Problem with given class_path '[\w.]+': (.*)", r"in one of them, \1", message)
    message = re.sub(r"Option '([\w.]+)' is not accepted", r"there is no setting \1", message)
    message = message.replace(", NoneType.", ".")
    message = re.sub(r'Parser key "([\w.]+)":', r"\1:", message)
    message = re.sub(r"Group '(\w+)' does not accept option '([\w.]+)'", r"there is no setting \1.\2", message)
    message = re.sub(r"unrecognized arguments: --([\w.]+).*", r"there is no setting \1", message)
    return message.replace("Problems parsing config:", "the configuration file is malformed:")
