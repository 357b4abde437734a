"""Checkpoints in and out, family by family: loaded, trained one step in several layouts, exported, and read by others.

Every family is made small and written by transformers in its own layout. Runs on one and on three stages (and on four processes
that share tokens and states) load it, take a step, and export the result. The loss must be that of plain transformers; the logits of
the export, as transformers 5 and transformers 4.57 read it, must be those of the plain model after the same step. Then faults are
planted in checkpoints and settings, none of which may pass unnoticed.

transformers 4.57 is installed, once, into ``.cache/transformers4`` by the versions in ``transformers4.txt``; that takes about a
minute. The last line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from hub_models import FAMILIES, Family, load
from planted import FAULTS, Outcome
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from infinipipe.data import DataSettings, TokenizerSettings
from infinipipe.data.tokenizer import train_tokenizer
from infinipipe.model import UnsupportedModelError, meta_model
from infinipipe.runtime.footprint import footprint
from infinipipe.runtime.pool import WorkerPool
from infinipipe.train.job import Job
from infinipipe.train.loop import Run
from infinipipe.train.model import model_config
from infinipipe.train.reference import plain_losses
from infinipipe.train.settings import (
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    PlanSettings,
    Settings,
    TrainSettings,
)
from infinipipe.verify import self_check

Layout = tuple[int, int, int]
LAYOUTS: tuple[Layout, ...] = ((1, 1, 1), (1, 3, 1), (1, 2, 2))
"""Replicas, stages, sequence parallelism."""
QUICK = 3
"""Families, the first ones, and as many layouts less one, of a quick run."""
LOSS_LIMIT = 1e-5
LOGIT_LIMIT = 1e-4
PLANNED_LIMIT = 0.01
ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".cache" / "transformers4"
CONSTRAINTS = Path(__file__).with_name("transformers4.txt")
OLD_SPELLINGS = ("rope_theta", "rope_scaling")
"""Where transformers 4 looks for rotary parameters; transformers 5 writes them elsewhere."""
CONTROL = "Llama 3 (llama3 scaling)"
"""The family whose export is read once more without these; its logits must then differ."""
TEXT = "The quick brown fox jumps over the lazy dog; def f(x): return x + 1"


@dataclass
class Found:
    """What was seen of a family.

    Attributes:
        model_type: of the language model that trained.
        layouts: those whose first loss was the plain model's.
        exported: those whose export transformers 5 reads with the plain model's logits.
        version4: those whose export transformers 4 reads with the same.
        exact: whether the architecture passes the self-check, cut and packed, in float64.
        planned: whether the planner counts the parameters that the family has in its usual size.
        loss_diff: the largest difference of a first loss.
        logit_diff: the largest difference of a logit, in either version.
        logits: how many were compared.
        problems: what went wrong.
    """

    model_type: str = ""
    layouts: list[str] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    version4: list[str] = field(default_factory=list)
    exact: bool = False
    planned: bool = False
    loss_diff: float = 0.0
    logit_diff: float = 0.0
    logits: int = 0
    problems: list[str] = field(default_factory=list)


def version4() -> Path:
    """The interpreter of an environment with transformers 4, which is made if it is not there."""
    python = ENVIRONMENT / "bin" / "python"
    done = ENVIRONMENT / "constraints.txt"
    if not done.is_file() or done.read_text() != CONSTRAINTS.read_text():
        print(f"installing transformers 4.57 into {ENVIRONMENT}, once", flush=True)
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
        packages = ["transformers", "torch", "numpy", "jinja2", "tokenizers", "huggingface_hub", "safetensors"]
        subprocess.run([python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, *packages], check=True)
        done.write_text(CONSTRAINTS.read_text())
    return python


def settings_of(folder: Path, source: Path, family: Family, layout: Layout, output: Path) -> Settings:
    """One step on a few short texts, with sequences cut into slices."""
    replicas, stages, sequence = layout
    return Settings(
        model=ModelSettings(path=str(source), weights="load", config=family.overrides),
        data=DataSettings(
            files=[f"{folder}/texts/*.txt"], cache=f"{folder}/cache", max_length=200, held_out=0, sequences_per_step=4
        ),
        tokenizer=TokenizerSettings(path=str(folder / "tokenizer")),
        plan=PlanSettings(planner="elastic-paper", num_slices=2, ahead=0),
        parallel=ParallelSettings(replicas=replicas, stages=stages, sequence_parallel=sequence),
        # A large epsilon: else a gradient near 0, whose sign is rounding, moves its weight as far as any other.
        optimizer=OptimizerSettings(learning_rate=0.02, warmup_steps=0, epsilon=1e-2),
        train=TrainSettings(output=str(output), steps=1, checkpoint_every=0, export_dtype="float32"),
    )


def execute(rank: int, settings: Settings) -> int:
    """One worker's part of a run, its lines left unsaid."""
    hf_logging.disable_progress_bar()
    job = Job.among(range(settings.parallel.num_processes), torch.device("cpu"))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return Run(job, settings, "one step").execute()


def prepare(folder: Path) -> None:
    """A tokenizer and texts of several lengths."""
    texts = [f"{TEXT} {number} " * (1 + number % 5) for number in range(12)]
    train_tokenizer(texts, folder / "tokenizer", vocab_size=300)
    (folder / "texts").mkdir()
    for number, text in enumerate(texts):
        (folder / "texts" / f"{number:02}.txt").write_text(text)


class Families:
    """All families in a folder, on pools of workers, with what transformers 4 is still to read."""

    def __init__(self, folder: Path, pools: dict[Layout, WorkerPool]) -> None:
        self.folder, self.pools = folder, pools
        self.jobs: list[dict[str, Any]] = []
        self._owners: list[tuple[str, str, torch.Tensor]] = []
        self.found: dict[str, Found] = {}
        self.control: float | None = None
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(1, 300, (150,), generator=generator).tolist()

    def try_family(self, name: str, family: Family) -> None:
        """Load, train and export a family in every layout; compare with the plain model."""
        found = self.found[name] = Found()
        place = self.folder / f"family{len(self.found)}"
        source = place / "source"
        family.write(source)
        settings = settings_of(self.folder, source, family, (1, 1, 1), place)
        config = model_config(settings.model, 0)
        found.model_type = config.model_type
        try:
            self_check(config)
            found.exact = True
        except UnsupportedModelError as error:
            found.problems.append(str(error))
        usual = type(config)()
        counted = footprint(usual, torch.float32).shape.parameters
        found.planned = abs(counted / sum(p.numel() for p in meta_model(usual).parameters()) - 1) < PLANNED_LIMIT
        plain = load(source)
        if family.overrides:
            plain = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.float32)
        expected = plain_losses(settings, 1, plain)[0]
        with torch.no_grad():
            logits = plain.eval()(input_ids=torch.tensor([self.tokens])).logits[0]
        for layout, pool in list(self.pools.items()):
            output = place / described(layout)
            try:
                pool.run(execute, settings_of(self.folder, source, family, layout, output))
                self._compare(name, layout, output, expected, logits)
            except Exception as error:  # a family that fails is reported, and the others go on
                pool.close()
                self.pools[layout] = WorkerPool(pool.size)
                found.problems.append(f"{described(layout)}: {str(error).strip().splitlines()[-1]}")

    def _compare(self, name: str, layout: Layout, output: Path, expected: float, logits: torch.Tensor) -> None:
        found, words = self.found[name], described(layout)
        records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        difference = abs(records[0]["loss"] - expected)
        found.loss_diff = max(found.loss_diff, difference)
        if difference < LOSS_LIMIT:
            found.layouts.append(words)
        model = AutoModelForCausalLM.from_pretrained(output / "checkpoint").eval()
        with torch.no_grad():
            read = model(input_ids=torch.tensor([self.tokens])).logits[0]
        generation = model.generation_config
        if self._equal(name, logits, read) and (generation.eos_token_id, generation.temperature) == ([0, 5], 0.7):
            found.exported.append(words)
        self._owners.append((name, words, logits))
        self.jobs.append(
            {
                "model": str(output / "checkpoint"),
                "tokens": self.tokens,
                "text": TEXT,
                "logits": str(output / "logits.safetensors"),
            }
        )

    def _equal(self, name: str, logits: torch.Tensor, read: torch.Tensor) -> bool:
        found = self.found[name]
        difference = float((logits - read).abs().max())
        found.logit_diff = max(found.logit_diff, difference)
        found.logits += logits.numel()
        return difference < LOGIT_LIMIT

    def read_by_version4(self, python: Path) -> None:
        """Have transformers 4 read every export, and one without the old spellings, which must not come out equal."""
        jobs = list(self.jobs)
        if CONTROL in self.found:
            control = self.folder / "control"
            job = jobs[next(index for index, (name, *_) in enumerate(self._owners) if name == CONTROL)]
            shutil.copytree(job["model"], control)
            config = json.loads((control / "config.json").read_text())
            config = {name: value for name, value in config.items() if name not in OLD_SPELLINGS}
            (control / "config.json").write_text(json.dumps(config))
            jobs.append(job | {"model": str(control), "logits": str(self.folder / "control.safetensors")})
        file = self.folder / "jobs.json"
        file.write_text(json.dumps(jobs))
        script = Path(__file__).with_name("transformers4.py")
        done = subprocess.run([python, script, file], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"transformers 4 failed:\n{done.stderr[-3000:]}")
        ids = AutoTokenizer.from_pretrained(self.folder / "tokenizer")(TEXT)["input_ids"]
        for (name, words, logits), job, seen in zip(
            self._owners, self.jobs, json.loads(done.stdout.splitlines()[-1]), strict=False
        ):
            read = load_file(job["logits"])["logits"]
            same = self._equal(name, logits, read)
            if same and (seen["ids"], seen["ends"], seen["dtype"]) == (ids, [0, 5], "torch.float32"):
                self.found[name].version4.append(words)
            else:
                self.found[name].problems.append(f"transformers 4, {words}: {seen}, equal logits: {same}")
        if len(jobs) > len(self.jobs):
            expected = next(logits for name, _, logits in self._owners if name == CONTROL)
            self.control = float((load_file(jobs[-1]["logits"])["logits"] - expected).abs().max())


def described(layout: Layout) -> str:
    replicas, stages, sequence = layout
    words = f"{stages} stage{'s' * (stages > 1)}"
    return words + (f" x {sequence}" if sequence > 1 else "") + (f" x {replicas} replicas" if replicas > 1 else "")


def run_families(folder: Path, names: Sequence[str], layouts: Sequence[Layout], python: Path) -> Families:
    pools = {layout: WorkerPool(layout[0] * layout[1] * layout[2]) for layout in layouts}
    families = Families(folder, pools)
    try:
        for name in names:
            start = time.perf_counter()
            families.try_family(name, FAMILIES[name])
            found = families.found[name]
            print(
                f"{name}: loss within {found.loss_diff:.1e}, logits within {found.logit_diff:.1e}, "
                f"{time.perf_counter() - start:.1f} s {'; '.join(found.problems)}",
                flush=True,
            )
    finally:
        for pool in pools.values():
            pool.close()
    families.read_by_version4(python)
    return families


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three families in two layouts, under 50 seconds")
    parser.add_argument("--family", action="append", help="only this family; may be given several times")
    parser.add_argument("--record", type=Path, help="where to write what was seen of every family, as JSON")
    options = parser.parse_args()
    hf_logging.disable_progress_bar()
    python = version4()
    names = options.family or (list(FAMILIES)[:QUICK] if options.quick else list(FAMILIES))
    layouts = LAYOUTS[:-1] if options.quick else LAYOUTS
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        families = run_families(folder, names, layouts, python)
        outcomes = {name: fault.plant(folder / "faults" / str(i)) for i, (name, fault) in enumerate(FAULTS.items())}
    found = families.found
    for name, outcome in outcomes.items():
        print(f"planted: {name}: {outcome.value}", flush=True)
    for name, seen in found.items():
        for problem in seen.problems:
            print(f"{name}: {problem}", flush=True)
    if options.record:
        record = {
            "layouts": [described(layout) for layout in layouts],
            "families": {n: asdict(f) for n, f in found.items()},
        }
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    count = len(layouts)
    silent = [name for name, outcome in outcomes.items() if outcome is Outcome.SILENT]
    result = {
        "families": len(found),
        "loaded": sum(len(seen.layouts) == count for seen in found.values()),
        "max_loss_diff": max(seen.loss_diff for seen in found.values()),
        "max_logit_diff": max(seen.logit_diff for seen in found.values()),
        "logits_compared": sum(seen.logits for seen in found.values()),
        "exported": sum(len(seen.exported) == count for seen in found.values()),
        "reloaded_by_v4": sum(len(seen.version4) == count for seen in found.values()),
        "control_logit_diff": families.control,
        "planted_faults": len(outcomes),
        "silent_faults": len(silent),
    }
    print(json.dumps(result))
    complete = all(result[key] == len(found) for key in ("loaded", "exported", "reloaded_by_v4"))
    compares = families.control is None or families.control > 100 * LOGIT_LIMIT
    return 0 if complete and compares and not silent else 1


if __name__ == "__main__":
    sys.exit(main())
