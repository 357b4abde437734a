"""``infinipipe check CONFIG [overrides]``: everything short of training, and what would happen."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from infinipipe.cli.train import read_settings
from infinipipe.settings import SettingError
from infinipipe.timeline.units import readable_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PretrainedConfig

    from infinipipe.data import Corpus
    from infinipipe.plan import Plan
    from infinipipe.train.planning import StepPlanner
    from infinipipe.train.settings import Settings

    Say = Callable[[str], None]

STEPS = 20
"""Steps that are drawn, of which a typical one and the largest are planned."""
SAMPLE = 1024
"""Documents of each source that are read."""
USAGE = "infinipipe check CONFIG [--section.setting VALUE ...]"


def run(arguments: Sequence[str]) -> int:
    """Check a configuration: 0 if the run would start, 2 with the sentence that it would end with."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(
            f"usage: {USAGE}\n\nDo everything that 'infinipipe train CONFIG' does short of training, on a sample of the data: read the "
            "model and the\ncorpus, tokenize, plan a typical and the largest step, compare memory with the budget and this machine; and say what "
            "would happen.\nNothing is written. Settings can be overridden as in training."
        )
        return 0
    if not arguments or arguments[0].startswith("-"):
        raise SettingError(f"name a configuration file first: {USAGE}")
    settings, _ = read_settings(arguments)
    check(settings, Console(highlight=False, soft_wrap=True))
    return 0


def check(settings: Settings, console: Console) -> None:
    """Say what training by ``settings`` would do. Raises ``ValueError`` with what it would end with."""
    from infinipipe.cost import typical_length
    from infinipipe.model.weights import meta_model
    from infinipipe.train.model import Vocabulary, open_model
    from infinipipe.train.optimizer import ParameterGroups
    from infinipipe.train.planning import StepPlanner
    from infinipipe.train.trainer import layout_of
    from infinipipe.verify import self_check

    def say(line: str) -> None:
        console.print(line, markup=False)

    start = open_model(settings) if settings.model.path else None
    with tempfile.TemporaryDirectory(prefix="infinipipe-check-") as folder:
        corpus = sample_corpus(settings, folder)
        start = start or open_model(settings, Vocabulary.of(corpus.tokenizer))
        config = start.config
        corpus.require_ids_below(config.vocab_size)
        for line in (*start.report, *corpus.report):
            say(line)
        self_check(config)
        layout_of(settings).for_heads(config.num_attention_heads)
        planner = StepPlanner(settings, config, typical_length(corpus.train.lengths))
        names = [name for name, _ in meta_model(config).named_parameters()]
        for line in ParameterGroups(settings.optimizer, names, ()).describe():
            say(line)
        drawn = draw(corpus, settings)
    say(
        f"{config.model_type} model of {planner.shape.parameters / 1e6:.1f}M parameters, "
        f"{'+'.join(map(str, planner.cost.stage_layers))} layers on {settings.parallel.layout}, {settings.model.dtype}"
    )
    plans = plan_steps(planner, drawn, settings, console)
    say_machine(plans, planner, settings, say_line=say)
    say_run(plans[0], planner, config, settings, say_line=say)


def sample_corpus(settings: Settings, cache: str) -> Corpus:
    """The first documents of every source, as a stream reads them; all of several sources without weights, which no stream can mix."""
    from infinipipe.data import open_corpus
    from infinipipe.train.console import Console as Lines

    data = dataclasses.replace(settings.data, cache=cache)
    if len(data.sources) < 2 or data.weights:
        window = min(SAMPLE, data.shuffle_window)
        data = dataclasses.replace(data, streaming=True, shuffle_window=window)
    with Lines(quiet=False).progress() as progress:
        return open_corpus(data, settings.tokenizer, progress)


def draw(corpus: Corpus, settings: Settings) -> list[list[int]]:
    """Lengths of the sequences of some steps, those of the fewest tokens first."""
    data = settings.data if corpus.stream is None else dataclasses.replace(settings.data, shuffle_window=SAMPLE)
    batches = corpus.batches(data, settings.train.seed)
    try:
        drawn = [[sample.length for sample in batches.next()] for _ in range(STEPS)]
    finally:
        batches.close()
    return sorted(drawn, key=sum)


def plan_steps(planner: StepPlanner, drawn: list[list[int]], settings: Settings, console: Console) -> list[Plan]:
    """Plans of the typical step and of the largest, which are shown. Raises ``PlanError`` if there is none."""
    from infinipipe.cli.plan import summarise
    from infinipipe.plan import PlanError

    plans = []
    for name, lengths in (("a typical step", drawn[len(drawn) // 2]), ("the largest", drawn[-1])):
        console.print(
            f"{name} of {len(drawn)} drawn, of {len(lengths)} sequences, the longest of {max(lengths):,} tokens:",
            markup=False,
        )
        try:
            plans.append(planner.plan(lengths))
        except PlanError as error:
            raise PlanError(f"{name} of {len(drawn)} drawn cannot be planned: {error}") from None
        summarise(console, plans[-1], planner.cost, planner.settings)
    longest = settings.data.max_length
    if max(map(max, drawn)) < longest:
        worst = [*sorted(drawn[-1])[:-1], longest]
        try:
            planner.plan(worst)
            said = f"a sequence of data.max_length, {longest:,} tokens, could be planned beside those of the largest"
        except PlanError as error:
            said = (
                f"warning: a sequence of data.max_length, {longest:,} tokens, could not be planned if one came: {error}"
            )
        console.print(said, markup=False)
    return plans


def say_machine(plans: list[Plan], planner: StepPlanner, settings: Settings, say_line: Say) -> None:
    """Processes and memory against what this machine has."""
    from infinipipe.planner import replica_peaks
    from infinipipe.train.machine import Machine

    parallel = settings.parallel
    machine = Machine.here(parallel.device, parallel.num_processes)
    say_line(f"{parallel.describe()}; this machine has {machine.describe()}")
    shards = parallel.sequence_parallel
    peaks = [peak for plan in plans for replica in plan.replicas for peak in replica_peaks(replica, planner.cost)]
    most = max(peaks)
    if machine.device.type == "cuda":
        if parallel.num_processes > machine.count:
            say_line(f"warning: that is more processes than GPUs here, {machine.count}; start them on several machines")
        whole, of = most, "on a GPU"
    else:
        if parallel.num_processes * parallel.threads > machine.count:
            say_line(
                f"warning: {parallel.num_processes} processes of parallel.threads {parallel.threads} share {machine.count} cores"
            )
        per_plan = [sum(sum(replica_peaks(r, planner.cost)) for r in plan.replicas) * shards for plan in plans]
        whole, of = max(per_plan), "here, for all processes"
    if whole > machine.memory:
        say_line(
            f"warning: {readable_bytes(whole, round_up=True)} are planned for, but {readable_bytes(machine.memory)} are free {of}; "
            "set plan.memory_budget, or use more stages"
        )
    if planner.settings.memory_budget is None:
        say_line(
            f"plan.memory_budget is not set, so that nothing is recomputed to save memory; the most of a stage is "
            f"{readable_bytes(most, round_up=True)}"
        )


def say_run(typical: Plan, planner: StepPlanner, config: PretrainedConfig, settings: Settings, say_line: Say) -> None:
    """Speed, length and checkpoints of the run, and where it starts."""
    from infinipipe.cost import optimizer_moments
    from infinipipe.model import model_fields
    from infinipipe.train.resume import changes_on_resume, require_same_model
    from infinipipe.train.schedule import schedule_remarks
    from infinipipe.train.store import CheckpointFolder, read_manifest

    train, optimizer = settings.train, settings.optimizer
    seconds = max(typical.metadata["predicted_seconds"])
    basis = (
        f"the cost file {settings.plan.cost}"
        if settings.plan.cost
        else f"an estimate, plan.flops_per_second {settings.plan.flops_per_second:g}; 'infinipipe profile' measures"
    )
    say_line(
        f"expected: {typical.num_tokens / seconds:,.0f} tokens/s, {seconds:.3g} s a typical step, by {basis}; "
        f"{train.last_step} steps of {typical.num_tokens:,} tokens take {timedelta(seconds=round(train.last_step * seconds))}"
    )
    for line in schedule_remarks(train.steps, optimizer):
        say_line(f"warning: {line}")
    tensors = 1 + len(optimizer_moments(optimizer.name, optimizer.momentum))
    size = round(planner.shape.parameters * 4 * tensors)
    output = Path(train.output)
    there = next(path for path in (output.resolve(), *output.resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free
    say_line(
        f"a checkpoint takes {readable_bytes(size, round_up=True)} in {output / 'checkpoints'}, where {train.keep_checkpoints} are "
        f"kept and {readable_bytes(free)} are free"
    )
    if size * (train.keep_checkpoints + 1) > free:
        say_line("warning: that is not enough; make room, or name another train.output")
    found = CheckpointFolder(output / "checkpoints", train.keep_checkpoints).newest()
    if train.resume not in ("auto", "never"):
        path = Path(train.resume)
        found = path, read_manifest(path)
    if found is None or train.resume == "never":
        say_line(
            f"the run would start anew in {output}" + ("" if found is None else " and set the checkpoints there aside")
        )
        return
    path, manifest = found
    require_same_model(path, model_fields(manifest.config), model_fields(config.to_dict()))
    for line in changes_on_resume(path, manifest, settings):
        say_line(f"warning: {line}")
    say_line(f"the run would go on after step {manifest.step} from {path}")
