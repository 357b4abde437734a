"""A large made corpus: how long it takes to tokenize on one process and on more, to start from the cache, and to draw a step.

``python benchmarks/data.py [--quick]`` prints one line for each figure and, last, all of them as JSON. The corpus is of short documents, which
cost the most beside their tokens. One process is one thread; ``tokenise_threads`` is the speed of one process with the threads of the library.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from infinipipe.data import DataSettings, TokenizerSettings
from infinipipe.data.workers import available_cpus

STEPS = 100
SHARDS = 20
COMPARED = {True: (200_000, 1), False: (400_000, 3)}
"""Documents on which one process and several are compared, and how often, of which the shortest counts; with and without --quick."""


def make_corpus(folder: Path, documents: int) -> None:
    """JSON lines in several files: short documents of made words, of which a few are long."""
    rng = random.Random(0)
    syllables = ["ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "zu"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(5000)]
    lines = [" ".join(rng.choices(words, k=rng.choice([4, 6, 8, 12, 16]))) for _ in range(20_000)]
    for shard in range(SHARDS):
        with (folder / f"{shard}.jsonl").open("w") as file:
            for number in range(documents // SHARDS):
                text = f"{number} {rng.choice(lines)}" + " ".join(rng.choices(lines, k=100)) * (number % 5000 == 0)
                file.write(f'{{"text": "{text}"}}\n')


def run(what: str, folder: Path, workers: int, *, documents: int = 0, threads: bool = True) -> dict[str, Any]:
    """One measurement in a process of its own, as a run has it."""
    environment = dict(os.environ)
    if not threads:
        environment["TOKENIZERS_PARALLELISM"] = "false"
    command = [sys.executable, __file__, "--measure", what, "--folder", str(folder)]
    command += ["--workers", str(workers), "--documents", str(documents)]
    finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(finished.stdout.splitlines()[-1])


def measure(what: str, folder: Path, workers: int, documents: int) -> dict[str, Any]:
    """``open``: seconds of opening the corpus, imports included, and of the steps then. ``tokenize``: those of making tokens of a part of it."""
    began = time.perf_counter()
    from infinipipe.data import Progress, open_corpus

    shards = sorted(folder.glob("*.jsonl"))
    cache = folder / "cache"
    if what == "tokenize":
        shards = shards[: max(1, SHARDS * documents // count_of(folder))]
        cache = Path(tempfile.mkdtemp(dir=folder))
    data = DataSettings(files=list(map(str, shards)), cache=str(cache), workers=workers, sequences_per_step=256)
    reached: list[float] = []

    def report(progress: Progress) -> None:
        reached.append(time.perf_counter())

    corpus = open_corpus(data, TokenizerSettings(path=str(folder / "tokenizer")), report)
    found: dict[str, Any] = {
        "seconds": time.perf_counter() - began,
        "documents": len(corpus.train) + len(corpus.held_out),
    }
    if what == "tokenize":
        return found | {"seconds": reached[-1] - reached[0]}
    batches = corpus.batches(data, seed=0)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        for sample in batches.next():
            _ = sample.tokens, sample.labels, sample.weights
        json.dumps(batches.state_dict())
        times.append(time.perf_counter() - start)
    return found | {"step_ms": 1000 * statistics.median(times), "longest_step_ms": 1000 * max(times)}


def count_of(folder: Path) -> int:
    """Documents of the whole corpus."""
    return SHARDS * sum(1 for _ in (folder / "0.jsonl").open())


def main() -> None:
    """Make the corpus, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer documents")
    parser.add_argument("--documents", type=int, help="how many; 2 million, or 400,000 with --quick")
    parser.add_argument("--workers", type=int, default=available_cpus(), help="processes to compare with one")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure, given.folder, given.workers, given.documents)))
        return
    documents = given.documents or (400_000 if given.quick else 2_000_000)
    part, times = COMPARED[given.quick]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_corpus(folder, documents)
        train(folder)
        made = run("open", folder, given.workers)
        print(f"{made['documents']:,} documents tokenized on {given.workers} processes in {made['seconds']:.1f} s")
        started = run("open", folder, given.workers)
        print(f"start from the cache {started['seconds']:.2f} s, a step's work {started['step_ms']:.1f} ms")
        single, threads, several = (
            min(run("tokenize", folder, workers, documents=part, threads=own)["seconds"] for _ in range(times))
            for workers, own in ((1, False), (1, True), (given.workers, True))
        )
        print(
            f"a part: {single:.1f} s on one process, {threads:.1f} s with threads, {several:.1f} s on {given.workers}"
        )
    figures = {
        "documents": started["documents"],
        "start_seconds": started["seconds"],
        "step_ms": started["step_ms"],
        "longest_step_ms": started["longest_step_ms"],
        "tokenise_seconds": made["seconds"],
        "workers": given.workers,
        "tokenise_speedup": single / several,
        "tokenise_threads": single / threads,
    }
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}))


def train(folder: Path) -> None:
    """A tokenizer of the corpus."""
    from infinipipe.data import train_tokenizer

    with (folder / "0.jsonl").open() as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(20_000), strict=False)]
    train_tokenizer(texts, folder / "tokenizer", vocab_size=8192)


if __name__ == "__main__":
    main()
