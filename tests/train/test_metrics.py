"""What is said and written of a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from infinipipe.plan import Chunk, Pipeline, Plan, build_replica, cut, whole
from infinipipe.runtime import Event
from infinipipe.settings import SettingError
from infinipipe.train.metrics import Evaluation, Pace, PlanSummary, StepRecord
from infinipipe.train.settings import TrainSettings
from infinipipe.train.trackers import MetricsWriter
from infinipipe.train.utilization import Busy, idle_share, peak_flops


def plan() -> Plan:
    lengths = (50, 5, 7)
    first, second, third = cut(0, 50, [20, 40])
    pipelines = [
        Pipeline((Chunk((first,)), Chunk((second,)), Chunk((third, *whole(lengths, [1]))))),
        Pipeline((Chunk(whole(lengths, [2])),)),
    ]
    return Plan((1, 1), lengths, (build_replica(pipelines, 2),))


def record(step: int, **changes: Any) -> StepRecord:
    known: dict[str, Any] = {
        "step": step,
        "loss": 2.5,
        "tokens": 1000,
        "seconds": 0.5,
        "gradient_norm": 0.25,
        "learning_rate": 0.01,
        "peak_bytes": [3 * 2**20, 2**20],
        "memory_bytes": [5 * 2**20, 2 * 2**20],
        "memory_budget": None,
        "flops_per_second": 1e9,
        "peak_flops": None,
        "idle": 0.2,
        "predicted_seconds": 0.4,
        "predicted": {"bubble": 0.1, "messages": 0.02, "recompute": 0.0},
        "plan": PlanSummary.of(plan()),
        "plan_hash": "abc",
    }
    return StepRecord(**known | changes)


def test_summary_counts_chunks_by_kind() -> None:
    assert PlanSummary.of(plan()) == PlanSummary(split=2, batched=1, hybrid=1, pipelines=2, most_slices=3)


def test_line_has_what_a_user_watches() -> None:
    assert record(7).line(120, 3725.2) == (
        "step   7/120  loss 2.5000  0.50 s  2,000 tokens/s  norm 0.250  rate 0.01  idle 20%  activations 3+1 MiB  "
        "1:02:05 left  1000 tokens: 2 split 1 batched 1 hybrid chunks, 2 pipelines, most slices 3"
    )
    limited = record(7, peak_flops=4e9, memory_budget=10 * 2**20).line(120, 0)
    assert "  2,000 tokens/s  MFU 25.0%  norm" in limited
    assert "  activations 3+1 MiB, 50% of the budget  0:00:00 left" in limited


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
    assert "mfu" in lines[0]


def test_time_left_goes_by_what_lies_between_the_latest_steps() -> None:
    pace = Pace(10, window=2)
    assert pace.left(record(1), now=100.5) == pytest.approx(9 * 0.5)
    assert pace.left(record(2), now=102.5) == pytest.approx(8 * 1.25)
    assert pace.left(record(3), now=104.5) == pytest.approx(7 * 2.0)
    assert pace.left(record(10), now=106.5) == 0.0


def test_idle_is_what_no_process_computes_in_until_the_last_is_done() -> None:
    first = Busy.of([Event("F0", 10.0, 11.0, 0.0), Event("B0", 13.0, 14.0, 2.0)], began=10.0)
    second = Busy.of([Event("F0", 11.0, 13.0, 1.0)], began=10.0)
    assert (first, second) == (Busy(2.0, 4.0), Busy(2.0, 3.0))
    assert idle_share([first, second]) == pytest.approx(1 - 4 / 8)
    assert idle_share([first, second, Busy.of([], began=10.0)]) == pytest.approx(1 - 4 / 12)


def test_peaks_are_those_of_the_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    for name, expected in {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "a new one": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(cuda, torch.bfloat16) == expected
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


class Service(ModuleType):
    """A stand-in for the package of a service, which notes what it is told."""

    def __init__(self, name: str, fails_at: int = -1) -> None:
        super().__init__(name)
        self.told: list[tuple[str, Any]] = []
        self._fails_at = fails_at

    def _note(self, call: str, *values: Any) -> Any:
        self.told.append((call, values))
        return self

    def init(self, **given: Any) -> Any:
        return self._note("init", given)

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self._fails_at:
            raise ConnectionError("no network")
        self._note("log", step, values["train/loss"])

    def finish(self) -> None:
        self._note("finish")

    def set_experiment(self, name: str) -> None:
        self._note("init", {"project": name})

    def start_run(self, run_name: str) -> None:
        self._note("init", {"name": run_name})

    def log_dict(self, values: dict[str, Any], name: str) -> None:
        self._note("init", {"config": values})

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.log(values, step)

    def end_run(self) -> None:
        self.finish()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_services_are_told_what_tensorboard_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    service = Service(name)
    monkeypatch.setitem(sys.modules, name, service)
    with MetricsWriter(tmp_path / "run", trackers=[name], project="mine", config={"seed": 1}) as metrics:
        metrics.step(record(1))
        metrics.step(record(2))
    begun = {key: value for call, values in service.told if call == "init" for key, value in values[0].items()}
    assert begun["project"] == "mine"
    assert begun["name"].startswith("run-")
    assert begun["config"] == {"seed": 1}
    assert [entry for entry in service.told if entry[0] != "init"] == [
        ("log", (1, 2.5)), ("log", (2, 2.5)), ("finish", ()),
    ]  # fmt: skip


def test_a_service_that_fails_is_said_once_and_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, said = Service("wandb", fails_at=2), list[str]()
    monkeypatch.setitem(sys.modules, "wandb", service)
    with MetricsWriter(tmp_path, trackers=["wandb"], say=said.append) as metrics:
        for step in (1, 2, 3):
            metrics.step(record(step))
    assert said == ["warning: wandb gets no metrics from here on: no network"]
    assert [call for call, _ in service.told] == ["init", "log"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_service_whose_package_is_missing_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinipipe.train.settings.find_spec", lambda name: None)
    with pytest.raises(
        SettingError, match="train.trackers names wandb, which is not installed; run 'pip install wandb'"
    ):
        TrainSettings(trackers=["wandb"])
