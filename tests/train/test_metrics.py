"""What is said and written of a step."""

from __future__ import annotations

import json
from pathlib import Path

from infinipipe.plan import Chunk, Pipeline, Plan, build_replica, cut, whole
from infinipipe.train.metrics import Evaluation, MetricsWriter, PlanSummary, StepRecord


def plan() -> Plan:
    lengths = (50, 5, 7)
    first, second, third = cut(0, 50, [20, 40])
    pipelines = [
        Pipeline((Chunk((first,)), Chunk((second,)), Chunk((third, *whole(lengths, [1]))))),
        Pipeline((Chunk(whole(lengths, [2])),)),
    ]
    return Plan((1, 1), lengths, (build_replica(pipelines, 2),))


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        loss=2.5,
        tokens=1000,
        seconds=0.5,
        gradient_norm=0.25,
        learning_rate=0.01,
        peak_bytes=[3 * 2**20, 2**20],
        plan=PlanSummary.of(plan()),
        plan_hash="abc",
    )


def test_summary_counts_chunks_by_kind() -> None:
    assert PlanSummary.of(plan()) == PlanSummary(split=2, batched=1, hybrid=1, pipelines=2, most_slices=3)


def test_line_has_what_a_user_watches() -> None:
    assert record(7).line(120) == (
        "step   7/120  loss 2.5000  2,000 tokens/s  norm 0.250  activations 3+1 MiB  "
        "1000 tokens: 2 split 1 batched 1 hybrid chunks, 2 pipelines, most slices 3"
    )


def test_files_are_written_as_steps_come_and_replaced_by_the_next_run(tmp_path: Path) -> None:
    for steps in (3, 1):
        with MetricsWriter(tmp_path) as metrics:
            for step in range(1, steps + 1):
                metrics.step(record(step))
                assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step
            metrics.evaluation(steps, Evaluation(2.0, tokens=10))
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [line["kind"] for line in lines] == ["step"] * steps + ["evaluation"]
        assert lines[0]["plan"]["most_slices"] == 3
        assert lines[-1] == {"kind": "evaluation", "step": steps, "loss": 2.0, "tokens": 10}
    assert list((tmp_path / "tensorboard").glob("events*"))
