"""A small corpus, a tiny model and one finished run on two processes that several tests look at."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infinipipe.cost import ModelShape, flop_cost
from infinipipe.cost.files import save_cost

CONFIG = """
model:
  config:
    model_type: llama
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 3
    num_attention_heads: 4
    num_key_value_heads: 2
    vocab_size: 300
    tie_word_embeddings: true
tokenizer: {{vocab_size: 300}}
data:
  files: ["{folder}/corpus/*.txt"]
  cache: "{folder}/cache"
  held_out: 0.2
  sequences_per_step: 4
plan: {{planner: elastic-paper, num_slices: 4, recompute: 1}}
parallel: {{stages: 2}}
optimizer: {{learning_rate: 0.01, warmup_steps: 2}}
train: {{output: "{folder}/run", steps: 6, evaluate_every: 4}}
"""
SHAPE = ModelShape(layers=3, hidden=32, intermediate=64, heads=4, kv_heads=2, head_dim=8, vocab=300, tied=True)
COMMAND = [sys.executable, "-m", "infinipipe.cli.main", "train"]


@dataclass(frozen=True)
class Finished:
    """A run that has ended, with the arguments that began it."""

    arguments: tuple[str, ...]
    output: Path
    code: int
    out: str
    err: str

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.output / "metrics.jsonl").read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def write_corpus(folder: Path) -> Path:
    """Write 40 texts, a few of them long, and a configuration; returns the latter."""
    rng = random.Random(0)
    (folder / "corpus").mkdir(parents=True)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    for index in range(40):
        count = rng.choice([1, 10, 30, 60, 300])
        (folder / "corpus" / f"{index:02}.txt").write_text(" ".join(rng.choice(words) for _ in range(count)))
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(folder=folder))
    return config


def train(config: Path, *overrides: str, output: str = "run") -> Finished:
    folder = config.parent / output
    arguments = (str(config), "--train.output", str(folder), *overrides)
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240, check=False)
    return Finished(arguments, folder, done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="session")
def finished(config: Path) -> Finished:
    """A run planned on a cost file, whose stages are not those it would have without, with timelines of its second step."""
    cost = config.with_name("cost.json")
    save_cost(flop_cost(SHAPE, (1, 2), element_bytes=4, flops_per_second=1e9, chunk_seconds=0.25), cost)
    return train(config, "--train.timeline_steps", "[2]", "--plan.cost", str(cost))
