"""Reads exported models with transformers 4, in an environment of its own: ``python transformers4.py JOBS``.

JOBS is a JSON list of {"model": folder, "tokens": ids, "text": a text, "logits": file to write}. Prints a JSON list with each
model's class, the dtype it was loaded in, the ids of the text and the ids that end a generation.
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> int:
    torch.set_num_threads(1)
    results = []
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    for job in jobs:
        model = AutoModelForCausalLM.from_pretrained(
            job["model"], torch_dtype="auto", attn_implementation="sdpa"
        ).eval()
        found = {"class": type(model).__name__, "dtype": str(model.dtype), "ends": model.generation_config.eos_token_id}
        found["ids"] = AutoTokenizer.from_pretrained(job["model"])(job["text"])["input_ids"]
        with torch.no_grad():
            logits = model.float()(input_ids=torch.tensor([job["tokens"]])).logits[0]
        save_file({"logits": logits.contiguous()}, job["logits"])
        results.append(found)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
