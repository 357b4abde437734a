"""The model card that goes along with an exported model: where it comes from, what it was trained on and how."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinipipe.train.assets import Provenance

CARD = "README.md"


def model_card(
    provenance: Provenance, kind: str, step: int, settings: str, records: Sequence[Mapping[str, Any]]
) -> str:
    """The card in Markdown, of a model of family ``kind`` after ``step`` steps of which ``records`` tell."""
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- {kind}\n- infinipipe\n---",
        f"# A {kind} model trained with InfiniPipe",
        _origin(provenance, step),
        "## Data\n\n" + "\n".join(f"* {line}" for line in provenance.corpus),
    ]
    if steps:
        parts.append("## Training\n\n" + _table(_training(steps, evaluations)))
        parts.append("## Plans\n\n" + _table(_plans(steps)))
    parts.append(f"## Settings\n\n```yaml\n{settings.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def is_model_of(folder: Path, provenance: Provenance, step: int) -> bool:
    """Whether a folder has the model of that run after ``step`` steps, in the same dtype, by its card."""
    path = folder / CARD
    return path.is_file() and _origin(provenance, step) in path.read_text(errors="replace").splitlines()


def _origin(provenance: Provenance, step: int) -> str:
    """The line that says what the weights are."""
    start = f"started from the weights of `{provenance.source}`" if provenance.source else "started from random weights"
    return f"Trained for {step} step{'s' * (step > 1)}, {start}; written in {provenance.dtype}."


def _training(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    rows = {
        "steps on record": f"{steps[0]['step']} to {steps[-1]['step']}",
        "tokens": f"{sum(record['tokens'] for record in steps):,}",
        "loss of the first and the last step": f"{steps[0]['loss']:.4f}, {steps[-1]['loss']:.4f}",
        "learning rate of the last step": f"{steps[-1]['learning_rate']:.3g}",
    }
    if evaluations:
        rows["held-out loss"] = f"{evaluations[-1]['loss']:.4f} over {evaluations[-1]['tokens']:,} tokens"
    return rows


def _plans(steps: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Means over the steps of what their plans were made of."""
    rows = {
        f"{name} chunks a step": f"{sum(record['plan'][name] for record in steps) / len(steps):.1f}"
        for name in ("split", "batched", "hybrid")
    }
    rows["pipelines a step"] = f"{sum(record['plan']['pipelines'] for record in steps) / len(steps):.1f}"
    rows["slices of the most finely cut sequence"] = str(max(record["plan"]["most_slices"] for record in steps))
    return rows


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def read_records(run: Path, step: int) -> list[dict[str, Any]]:
    """What the metrics of a run tell of its first ``step`` steps."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [record for line in lines if (record := json.loads(line))["step"] <= step]
