"""The command ``infinipipe``: finds the sub-command and turns a user's error into one sentence."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

COMMANDS = {
    "init": ("infinipipe.cli.init", "write a configuration to start from, for a model, its data and this machine"),
    "check": ("infinipipe.cli.check", "do everything short of training, and say what would happen"),
    "train": ("infinipipe.cli.train", "train a model as a configuration file says"),
    "profile": ("infinipipe.cli.profile", "measure a model on this machine and write its cost file"),
    "export": ("infinipipe.cli.export", "write a run's checkpoint as a Hugging Face model"),
    "data": ("infinipipe.cli.data", "how long the sequences of a corpus are, and what steps are made of them"),
    "plan": ("infinipipe.cli.plan", "plan a step and compare planners"),
    "simulate": ("infinipipe.cli.simulate", "what a plan's step will take, and where its time and memory go"),
    "rehearse": ("infinipipe.cli.rehearse", "run a plan's processes and messages with computing replaced by waiting"),
    "timeline": ("infinipipe.cli.timeline", "draw simulated and measured steps"),
}
"""Module, with a function ``run(arguments) -> exit code``, and summary of every command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0, 2 for a user's error, 1 for a failure, 130 if interrupted."""
    parser = argparse.ArgumentParser(
        prog="infinipipe",
        description="Elastic Pipeline Parallelism: exact, memory-fitted training on long, variable-length sequences.",
        epilog="commands:\n"
        + "\n".join(f"  {name:10} {summary}" for name, (_, summary) in COMMANDS.items())
        + "\n\n'infinipipe COMMAND --help' lists what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"infinipipe {version('infinipipe')}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the command takes")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        parser.print_help()
        return 2
    parsed = parser.parse_args(given)
    try:
        return importlib.import_module(COMMANDS[parsed.command][0]).run(parsed.arguments)
    except ValueError as error:
        print(f"infinipipe: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("infinipipe: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
