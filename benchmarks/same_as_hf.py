"""The first step losses of a training run against a plain Hugging Face loop on the same batches.

Runs ``infinipipe train`` on real processes, then the plain model in one process. The last line printed is a JSON object with
the losses and the largest difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from infinipipe.cli.train import read_settings
from infinipipe.train.reference import plain_losses

EXAMPLE = Path(__file__).parents[1] / "examples" / "stdlib.toml"
QUICK = [
    *("--data.files", '["{stdlib}/asyncio/*.py", "{stdlib}/email/*.py"]'),
    *("--data.max_length", "2048", "--plan.token_capacity", "512", "--data.sequences_per_step", "3"),
]
LIMIT = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps and short sequences, under 50 seconds")
    parser.add_argument("--steps", type=int, help="steps to compare; 20, or 3 if quick")
    parser.add_argument("--config", type=Path, default=EXAMPLE)
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help="settings as for infinipipe train")
    options = parser.parse_args()
    num_steps = options.steps or (3 if options.quick else 20)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(options.config), "--train.output", folder, "--train.stop_after", str(num_steps)]
        arguments += ["--train.evaluate_sequences", "1"]
        if options.quick:
            arguments += [*QUICK, "--data.cache", f"{folder}/cache"]
        arguments += options.overrides
        start = time.perf_counter()
        code = subprocess.run(
            [sys.executable, "-m", "infinipipe.cli.main", "train", *arguments], check=False
        ).returncode
        if code != 0:
            return code
        seconds = time.perf_counter() - start
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        start = time.perf_counter()
        expected = plain_losses(read_settings(arguments)[0], num_steps)
    steps = [record for record in records if record["kind"] == "step"]
    losses = [record["loss"] for record in steps]
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    result = {
        "steps": num_steps,
        "max_loss_diff": difference,
        "most_slices": max(record["plan"]["most_slices"] for record in steps),
        "hybrid_chunks": sum(record["plan"]["hybrid"] for record in steps),
        "losses": losses,
        "plain_losses": expected,
        "seconds": round(seconds, 1),
        "plain_seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(result))
    return 0 if difference < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
