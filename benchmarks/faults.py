"""Kills training at random moments, during saving too, and resumes it; the weights must be those of an undisturbed run.

Two processes (two stages) train a tiny model on texts that this program writes. A fault kills one worker, after which the other must
end by itself, or all processes at once; some faults damage the newest checkpoint as well. The last line printed is a JSON object:
``kills``, ``recovered`` (kills after which a start went on), ``steps_lost_max`` (between a kill and the checkpoint resumed from, where
that was not damaged on purpose), ``corrupt_checkpoints_loaded`` (starts whose losses left the undisturbed run's), and more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

CONFIG = """
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}}
tokenizer: {{vocab_size: 300}}
data: {{files: ["{folder}/texts/*.txt"], cache: "{folder}/cache", held_out: 0.1, sequences_per_step: 3}}
plan: {{num_slices: 2, ahead: 0}}
parallel: {{stages: 2, device: cpu}}
optimizer: {{warmup_steps: 5}}
train: {{steps: {steps}, checkpoint_every: {every}, timeout: 20}}
"""
WORKERS = 2
PRELOADED = [
    "infinipipe.train.loop",
    "infinipipe.cli.train",
    "transformers.models.llama.modeling_llama",
    "docstring_parser",
]
SECONDS_TO_END = 40.0


def work(rank: int, port: int, arguments: list[str], log: str) -> None:
    """One worker, as a launcher would start it."""
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    from infinipipe.cli.train import run

    os._exit(run(arguments))


class Training:
    """The processes of one start."""

    def __init__(self, context: ForkServerContext, config: Path, output: Path) -> None:
        self.output = output
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = [str(config), "--train.output", str(output)]
        output.mkdir(exist_ok=True)
        self.workers: list[ForkServerProcess] = []
        for rank in range(WORKERS):
            self.workers.append(context.Process(target=work, args=(rank, port, arguments, str(output / f"{rank}.log"))))
            self.workers[-1].start()

    def kill(self, ranks: list[int]) -> bool:
        """Kill some workers; whether the others then ended in time."""
        for rank in ranks:
            self.workers[rank].kill()
        ended = self.wait(SECONDS_TO_END)
        for worker in self.workers:
            worker.kill()
            worker.join()
        return ended

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for worker in self.workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        return not any(worker.is_alive() for worker in self.workers)


def losses(output: Path) -> dict[int, float]:
    """Losses by step; a line that is being written is left out."""
    try:
        lines = (output / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return {}
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


def newest_step(output: Path) -> int:
    """The step that the next start will resume from."""
    from infinipipe.train.store import CheckpointFolder

    found = CheckpointFolder(output / "checkpoints", keep=1).newest()
    return 0 if found is None else found[1].step


def damage(output: Path) -> bool:
    """Cut the end off the newest checkpoint's largest file, if there is an older one."""
    checkpoints = sorted((output / "checkpoints").glob("step-????????"))
    if len(checkpoints) < 2:
        return False
    file = max(checkpoints[-1].glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    return True


def await_moment(training: Training, rng: random.Random, steps: int) -> str:
    """Wait for the moment of a fault; says which it is, or ``done`` if training ended before."""
    output, start = training.output, newest_step(training.output)
    moment = rng.choice(["starting", "step", "saving", "saving"])
    deadline = time.monotonic() + 60
    if moment == "starting":
        time.sleep(rng.uniform(0.0, 1.5))
        return moment
    first = start + (rng.randint(1, 8) if moment == "step" else 1)
    while max(losses(output), default=0) < first and time.monotonic() < deadline:
        time.sleep(0.01)
    if moment == "step":
        time.sleep(rng.uniform(0.0, 0.2))
    else:
        saves = rng.randint(1, 3)
        seen: set[str] = set()
        while len(seen) < saves and time.monotonic() < deadline:
            seen |= {path.name for path in (output / "checkpoints").glob("*.tmp")}
            if not all(worker.is_alive() for worker in training.workers):
                break
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.02))
    return moment if all(worker.is_alive() for worker in training.workers) else "done"


def weights(output: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: t for path in (output / "checkpoint").glob("*.safetensors") for name, t in load_file(path).items()}


def same_weights(first: Path, second: Path) -> bool:
    """Whether two exported models are equal bit for bit."""
    ours, theirs = weights(first), weights(second)
    return ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)


def write_texts(folder: Path) -> None:
    rng = random.Random(0)
    (folder / "texts").mkdir()
    for index in range(40):
        words = [rng.choice(["alpha", "beta", "gamma", "delta", "eps"]) for _ in range(rng.choice([4, 20, 80]))]
        (folder / "texts" / f"{index:02}.txt").write_text(" ".join(words))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 kills, under 50 seconds")
    parser.add_argument("--kills", type=int, help="how many; 20, or 3 if quick")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kills = options.kills or (3 if options.quick else 20)
    steps, every, rng = 10 * kills + 2, 4, random.Random(options.seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder)
        config = folder / "config.yaml"
        config.write_text(CONFIG.format(folder=folder, steps=steps, every=every))
        calm = folder / "calm"
        if not Training(context, config, calm).wait(600) or len(losses(calm)) != steps:
            print((calm / "0.log").read_text(), file=sys.stderr)
            return 1
        figures = campaign(context, config, folder / "rough", losses(calm), kills, rng)
        figures["weights_equal"] = same_weights(calm, folder / "rough")
    figures |= {"checkpoint_every": every, "steps": steps, "seconds": round(time.perf_counter() - begin, 1)}
    print(json.dumps(figures))
    good = figures["weights_equal"] and figures["recovered"] == figures["kills"] and not figures["hangs"]
    return 0 if good and not figures["corrupt_checkpoints_loaded"] else 1


def campaign(
    context: ForkServerContext, config: Path, output: Path, expected: dict[int, float], kills: int, rng: random.Random
) -> dict[str, Any]:
    """Start, kill and start again until all kills are done, then let the run end."""
    moments: dict[str, int] = {}
    damaged = lost = hangs = corrupt = recovered = killed = 0
    while True:
        before = newest_step(output)
        training = Training(context, config, output)
        moment = "done" if killed == kills else await_moment(training, rng, len(expected))
        if moment == "done":
            training.wait(600)
        reached = losses(output)
        if moment != "done":
            whole = rng.random() < 0.5
            hangs += not training.kill(list(range(WORKERS)) if whole else [rng.randrange(WORKERS)])
            killed += 1
            moments[moment] = moments.get(moment, 0) + 1
            reached = losses(output)
        wrong = [step for step, loss in reached.items() if loss != expected[step]]
        corrupt += bool(wrong)
        if max(reached, default=0) > before:
            recovered = killed if moment == "done" else killed - 1
        print(
            f"start from step {before}: {moment} at step {max(reached, default=0)}, newest checkpoint {newest_step(output)}",
            flush=True,
        )
        if moment == "done":
            break
        lost = max(lost, max(reached, default=0) - newest_step(output))
        if rng.random() < 0.2:
            damaged += damage(output)
    return {
        "kills": killed,
        "recovered": recovered,
        "steps_lost_max": lost,
        "corrupt_checkpoints_loaded": corrupt,
        "hangs": hangs,
        "damaged_on_purpose": damaged,
        "moments": dict(sorted(moments.items())),
    }


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
