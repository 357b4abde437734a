"""``infinipipe init CONFIG``: a commented configuration to start from, for a model, its data and this machine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from infinipipe.cli.options import parse_options
from infinipipe.cli.train import read_settings
from infinipipe.files import write_beside
from infinipipe.planner.settings import GIB
from infinipipe.settings import SettingError, require_range

if TYPE_CHECKING:
    from infinipipe.train.machine import Machine
    from infinipipe.train.settings import Settings

SHARE = 0.8
"""Of the free memory that the budget takes; the rest is for what is not planned: the program itself, fragments, other programs."""
LEAST_CAPACITY, MOST_CAPACITY = 256, 2**20
LENGTH = 16384
"""Tokens of the longest sequence where the model does not say."""
STDLIB = "{stdlib}/**/*.py"
SMALL_MODEL = """[model.config]                # a small new model; --model names a Hugging Face model in its place
model_type = "llama"
hidden_size = 256
intermediate_size = 704
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 16384"""


@dataclass(frozen=True)
class InitOptions:
    """What to start from.

    Attributes:
        config: the configuration file to write, in TOML.
        model: folder of a Hugging Face model, or its config.json; a small new model if not given.
        data: a file or glob of the documents, such as "data/**/*.jsonl"; the Python standard library's source files if not given.
        stages: pipeline stages; if not given, as many as there are GPUs, or 2 on CPUs, and no more than layers.
    """

    config: str
    model: str | None = None
    data: str | None = None
    stages: int | None = None

    def __post_init__(self) -> None:
        if Path(self.config).suffix.lower() != ".toml":
            raise SettingError(f"the configuration is written in TOML; let the name {self.config!r} end in .toml")
        if Path(self.config).exists():
            raise SettingError(f"{self.config} exists; name a new file")
        if self.stages is not None:
            require_range("stages", self.stages, at_least=1)


def run(arguments: Sequence[str]) -> int:
    """Write the configuration and say what was chosen."""
    description = (
        "Write a commented configuration for 'infinipipe train'. Budget and capacity are chosen for this machine."
    )
    options = parse_options(InitOptions, "init", description, arguments)
    text, said = starter(options)
    write_beside(options.config, text.encode())
    print(f"wrote {options.config}: {said}")
    print(f"next: infinipipe check {options.config}; infinipipe train {options.config}")
    return 0


def starter(options: InitOptions) -> tuple[str, str]:
    """The configuration, which has been read back, and what was chosen, in words. Raises ``ValueError`` for a model that cannot be used."""
    from infinipipe.data.sources import find_shards
    from infinipipe.train.machine import Machine

    machine = Machine.here()
    stages = options.stages or (machine.count if machine.device.type == "cuda" else min(2, machine.count))
    first = _settings(_text(options, machine, stages, None, None))
    find_shards(first.data)
    if options.stages is None:
        stages = min(stages, _layers(first))
    budget = float(f"{SHARE * machine.of_process(stages) / GIB:.3g}")
    settings = _settings(_text(options, machine, stages, budget, None))
    capacity = _capacity(settings)
    text = _text(options, machine, stages, budget, capacity)
    _settings(text)
    return text, (
        f"{stages} stage{'s' * (stages > 1)}, {budget:g} GiB for each, chunks of up to {capacity:,} tokens, for "
        f"{machine.describe()}"
    )


def _settings(text: str) -> Settings:
    """What a configuration says. Raises ``SettingError``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(text)
        return read_settings([str(path)])[0]


def _layers(settings: Settings) -> int:
    from infinipipe.train.model import model_config

    return int(model_config(settings.model, settings.tokenizer.vocab_size).num_hidden_layers)


def _capacity(settings: Settings) -> int:
    """The largest power of two of tokens of which a chunk for every stage fits the budget without recompute, up to the longest sequence.

    If none does, the least: the planner recomputes then.
    """
    from infinipipe.plan import PlanError
    from infinipipe.train.model import model_config
    from infinipipe.train.planning import StepPlanner

    config = model_config(settings.model, settings.tokenizer.vocab_size)
    plan = replace(settings.plan, recompute="none", num_slices=1)
    planner = StepPlanner(replace(settings, plan=plan), config, settings.data.max_length)
    best = capacity = LEAST_CAPACITY
    while capacity <= min(MOST_CAPACITY, settings.data.max_length):
        try:
            planner.plan([capacity] * settings.parallel.stages)
        except PlanError:
            break
        best, capacity = capacity, 2 * capacity
    return best


def _text(options: InitOptions, machine: Machine, stages: int, budget: float | None, capacity: int | None) -> str:
    """The configuration as TOML."""
    on_gpu = machine.device.type == "cuda"
    device, loads, length = "GPU" if on_gpu else "process", False, LENGTH
    model, tokenizer = SMALL_MODEL, _line("vocab_size = 8192", "entries of a tokenizer that is trained on the data")
    if options.model is not None:
        folder = Path(options.model) if Path(options.model).is_dir() else Path(options.model).parent
        loads = Path(options.model).is_dir() and any(folder.glob("*.safetensors"))
        length = _positions(options.model)
        weights = "load" if loads else "random"
        model = "\n".join(
            ["[model]", f"path = {json.dumps(options.model)}", _line(f'weights = "{weights}"', "load or random")]
        )
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
            tokenizer = f"path = {json.dumps(str(folder))}"
        if on_gpu:
            model += '\ndtype = "bfloat16"'
    lines = [
        f"# Written by 'infinipipe init'. 'infinipipe check {options.config}' says what would happen.",
        "",
        model,
        "",
        "[tokenizer]",
        tokenizer,
        "",
        "[data]",
        f"files = [{json.dumps(options.data or STDLIB)}]",
        *(['exclude = ["*/site-packages/*"]'] if options.data is None else []),
        _line('on_undecodable = "drop"', "what is not UTF-8 is left out, and counted"),
        _line(f"max_length = {length}", "tokens of the longest sequence"),
        _line('on_too_long = "drop"', "what becomes of longer ones: drop, truncate, split or error"),
        _line(f"sequences_per_step = {32 if on_gpu else 4}", "of all replicas together"),
        "",
        _line("[plan]", "how each step is cut, packed, scheduled and recomputed"),
    ]
    if budget is not None:
        share = f"GiB of each {device}: {SHARE:.0%} of what is free here"
        lines += [_line(f"memory_budget = {budget:g}", f"{share}; layers are recomputed to keep to it")]
    if capacity is not None:
        lines += [
            _line(f"token_capacity = {capacity}", "most tokens of a chunk: one for each stage fits without recompute")
        ]
    lines += [
        _line('# cost = "cost.json"', "what 'infinipipe profile' has measured, for better plans"),
        "",
        "[parallel]",
        _line(f"stages = {stages}", "pipeline stages, a process each"),
        _line("# sequence_parallel = 2", "processes that share the tokens and the states of a stage"),
        _line("# replicas = 2", "copies of the pipeline"),
        "",
        "[optimizer]",
        'name = "adamw"',
        f"learning_rate = {'1e-5' if loads else '1e-3'}",
        'schedule = "cosine"',
        "warmup_steps = 10",
        "weight_decay = 0.1",
        "",
        "[train]",
        _line(
            f"output = {json.dumps(f'runs/{Path(options.config).stem}')}",
            "logs, metrics, checkpoints, and at the end the model",
        ),
        "steps = 100",
        _line("evaluate_every = 50", "on documents that are held out"),
        "checkpoint_every = 50",
    ]
    return "\n".join(lines) + "\n"


def _line(setting: str, meaning: str) -> str:
    return f"{setting:30}# {meaning}"


def _positions(model: str) -> int:
    """Tokens of the longest sequence that a model is made for."""
    from infinipipe.model import load_config

    return int(getattr(load_config(model), "max_position_embeddings", None) or LENGTH)
