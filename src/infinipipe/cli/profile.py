"""``infinipipe profile MODEL OUTPUT``: measure a model on this machine and write its cost file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from infinipipe.cli.options import parse_options, require_output
from infinipipe.cost import ModelShape, balanced_stages
from infinipipe.cost.files import save_cost
from infinipipe.plan import Placement, placement_named
from infinipipe.settings import SettingError, require_range

if TYPE_CHECKING:
    from infinipipe.profile.design import Design
    from infinipipe.profile.session import Progress as Report
    from infinipipe.profile.workers import Setup


STAGES = 2
"""Stages that a cost file describes if no option says."""


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure.

    Attributes:
        model: a Hugging Face config.json or its folder.
        output: the cost file to write; an interrupted profile goes on from OUTPUT.partial.
        stages: pipeline stages that the cost file describes; if not given, those of stage_layers, else 2.
        placement: which parts of the model (virtual stages) lie on which of these stages: plain, interleaved or v, as in training.
        parts_per_stage: parts on each stage; if not given, 1 where the placement is plain, else 2.
        stage_layers: layers of every part, which is every stage where the placement is plain, such as "[2, 1]"; if not given, all take equal time for sequences of longest tokens.
        processes: stages that are measured at once; by default as many as stages, devices and cores allow; never more than devices, or cores for threads each.
        layers: layers of each measured process, at most the model's; by default those of the described stages if all of these are
            measured, else 2, or as many as it takes to have layers of every window.
        sequence_parallel: devices that share a stage's tokens; where there are fewer devices or cores, stages are measured without.
        device: auto takes CUDA where there is a device.
        dtype: of the computing.
        threads: of each process on the CPU.
        longest: tokens of the longest measured sequence.
        capacity: most tokens of a chunk of packed sequences.
        smallest: tokens of the smallest slice.
        max_slices: most slices of a sequence.
        plans: how many plans of a few chunks are measured.
        repeats: undisturbed runs of each that are waited for.
        loss_block_tokens: tokens whose logits exist at once.
    """

    model: str
    output: str
    stages: int | None = None
    placement: Literal["plain", "interleaved", "v"] = "plain"
    parts_per_stage: int | None = None
    stage_layers: list[int] | None = None
    processes: int | None = None
    layers: int | None = None
    sequence_parallel: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    longest: int = 8192
    capacity: int = 4096
    smallest: int = 128
    max_slices: int = 8
    plans: int = 24
    repeats: int = 5
    loss_block_tokens: int = 1024

    def __post_init__(self) -> None:
        for name in ("sequence_parallel", "threads", "repeats", "loss_block_tokens"):
            require_range(name, getattr(self, name), at_least=1)
        for name in ("stages", "parts_per_stage", "processes", "layers"):
            if getattr(self, name) is not None:
                require_range(name, getattr(self, name), at_least=1)
        per_stage = self.per_stage
        if self.stage_layers is not None and self.stages not in (None, len(self.stage_layers) / per_stage):
            parts = "" if per_stage == 1 else f" of {per_stage} parts"
            raise SettingError(
                f"stages is {self.stages}{parts}, but stage_layers {self.stage_layers} names {len(self.stage_layers)}; leave one of "
                "them out"
            )
        if self.stage_layers is not None and len(self.stage_layers) % per_stage:
            raise SettingError(
                f"stage_layers {self.stage_layers} names {len(self.stage_layers)} parts, which is no multiple of parts_per_stage, "
                f"{per_stage}"
            )
        try:
            _ = self.placed
        except ValueError as error:
            raise SettingError(f"placement with parts_per_stage: {error}") from None
        require_output(self.output, (self.model, Path(self.model) / "config.json"))

    @property
    def per_stage(self) -> int:
        """Parts on each described stage."""
        return self.parts_per_stage or (1 if self.placement == "plain" else 2)

    @property
    def placed(self) -> Placement:
        """The parts of every described stage."""
        given = self.stage_layers
        stages = self.stages or (STAGES if given is None else len(given) // self.per_stage)
        return placement_named(self.placement, stages, self.per_stage)

    def design(self) -> Design:
        """The plans to measure. Raises ``SettingError``."""
        from infinipipe.profile.design import Design

        return Design(
            longest=self.longest,
            capacity=self.capacity,
            smallest=self.smallest,
            max_slices=self.max_slices,
            num_plans=self.plans,
        )


def run(arguments: Sequence[str]) -> int:
    """Measure, fit, report and write."""
    description = "Measure a model's stages on this machine and write the cost file that planning and simulating need."
    options = parse_options(ProfileOptions, "profile", description, arguments)
    design, output = options.design(), Path(options.output)
    from infinipipe.profile import fit_profile, measure, quality_lines

    setup, stage_layers = make_setup(options)
    partial = output.with_name(output.name + ".partial")
    with progress_bar() as report:
        measured = measure(setup, design, options.repeats, partial, report)
    profile = fit_profile(setup, measured, stage_layers, options.placed)
    for line in quality_lines(profile):
        print(line)
    save_cost(profile.cost, output)
    partial.unlink()
    print(f"wrote {output}")
    return 0


def make_setup(options: ProfileOptions) -> tuple[Setup, tuple[int, ...]]:
    """What to measure, and the stages to describe. Raises ``SettingError`` and ``ValueError`` for what cannot be."""
    import torch

    from infinipipe.model import check_supported, load_config
    from infinipipe.profile.workers import Setup
    from infinipipe.runtime.footprint import footprint

    config = load_config(options.model)
    check_supported(config)
    shape = footprint(config, getattr(torch, options.dtype)).shape
    if options.stage_layers is None:
        stage_layers = balanced_stages(shape, options.placed.num_parts, options.longest)
    else:
        stage_layers = tuple(options.stage_layers)
        if sum(stage_layers) != config.num_hidden_layers or min(stage_layers) < 1:
            raise SettingError(
                f"stage_layers {list(stage_layers)} must be counts above 0 that add up to the model's "
                f"{config.num_hidden_layers} layers"
            )
    if options.layers is not None and options.layers > config.num_hidden_layers:
        raise SettingError(
            f"layers is {options.layers}, but the model has {config.num_hidden_layers}; use at most so many, or leave it out"
        )
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "cuda" and not devices:
        raise SettingError("device is cuda, but this machine has none; use cpu")
    device = "cuda" if devices and options.device != "cpu" else "cpu"
    cores = os.cpu_count() or 1
    room = devices if device == "cuda" else max(1, cores // options.threads)
    shards = options.sequence_parallel if options.sequence_parallel <= room else 1
    processes = options.processes or min(options.placed.num_stages, room // shards)
    for name, count in (
        ("processes", processes * shards),
        ("sequence_parallel", options.sequence_parallel),
    ):
        if device == "cuda" and count > devices:
            raise SettingError(f"{name} is {count}, but this machine has {devices} devices")
    if device == "cpu" and processes * shards > room:
        raise SettingError(
            f"processes is {processes}, but {processes * shards} processes of --threads {options.threads} on {cores} cores would "
            f"measure each other's slowness; use at most {room // shards}"
        )
    if processes == len(stage_layers) and options.layers is None:
        measured = stage_layers
    else:
        measured = (options.layers or max(2, -(-_distinct(shape) // processes)),) * processes
    setup = Setup(
        config=config,
        stage_layers=measured,
        dtype=options.dtype,
        device=device,
        threads=options.threads,
        loss_block_tokens=options.loss_block_tokens,
        sequence_parallel=options.sequence_parallel,
        shards=shards,
    )
    return setup, stage_layers


def _distinct(shape: ModelShape) -> int:
    """How many of a model's first layers have all windows that any of them has."""
    windows = [shape.layer_window(layer) for layer in range(shape.layers)]
    return 1 + max(windows.index(window) for window in windows)


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A function that moves a bar on a terminal, and prints a line at every new part elsewhere."""
    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    seen: set[str] = set()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        task = bars.add_task("measuring", total=None)

        def report(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)
            if what not in seen and not console.is_terminal:
                print(f"{what} ({done} of {total} done)", flush=True)
            seen.add(what)

        yield report
