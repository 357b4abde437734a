"""Where the metrics of a run go: ``metrics.jsonl``, TensorBoard, and services of the user's choice."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from infinipipe.train.metrics import Evaluation, StepRecord


class Tracker(Protocol):
    """Something that draws curves."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take values by name after ``step`` steps."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class TensorBoard:
    """Curves in ``folder``; what an earlier run drew after ``after_step`` steps is hidden."""

    def __init__(self, folder: Path, after_step: int) -> None:
        self._board = SummaryWriter(str(folder), purge_step=after_step + 1 if after_step else 0)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._board.close()


class WandB:
    """A run of Weights & Biases; its package is ``module``, or one that takes the same calls."""

    def __init__(self, module: Any, project: str, run: str, config: Mapping[str, Any]) -> None:
        self._run = module.init(project=project, name=run, id=run, resume="allow", config=dict(config))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio."""

    def __init__(self, module: Any, project: str, run: str, config: Mapping[str, Any]) -> None:
        self._run = module.init(project=project, name=run, resume="allow", config=dict(config))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow in the experiment ``project``."""

    def __init__(self, module: Any, project: str, run: str, config: Mapping[str, Any]) -> None:
        self._module = module
        module.set_experiment(project)
        module.start_run(run_name=run)
        module.log_dict(dict(config), "settings.json")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._module.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._module.end_run()


SERVICES: dict[str, Callable[[Any, str, str, Mapping[str, Any]], Tracker]] = {
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""What makes a tracker of a package, by the package's name."""


class Guarded:
    """A service of which a failure is said once and then left alone: it must not cost the training."""

    def __init__(self, name: str, make: Callable[[], Tracker], say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self._tracker: Tracker | None = None
        with self:
            self._tracker = make()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        with self:
            if self._tracker is not None:
                self._tracker.scalars(step, values)

    def close(self) -> None:
        with self:
            if self._tracker is not None:
                self._tracker.close()

    def __enter__(self) -> None:
        """Within, a failure is said, and the service given up."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._tracker = None
        reason = " ".join(str(error).split()) or type(error).__name__
        self._say(f"warning: {self._name} gets no metrics from here on: {reason}")
        return True


class MetricsWriter:
    """Writes ``metrics.jsonl`` and ``tensorboard/`` in ``folder``, and tells the services in ``trackers``.

    What is there of the first ``after_step`` steps stays; what an earlier run did after them is replaced or hidden.

    Args:
        trackers: names of the services.
        project: what the run belongs to there; it is named after ``folder``, and is the same when the run resumes, but for MLflow, where it is a new one.
        config: the run's settings, for them.
        say: told of services that fail.
    """

    def __init__(
        self,
        folder: Path,
        *,
        after_step: int = 0,
        trackers: Sequence[str] = (),
        project: str = "",
        config: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = _records_until(path, after_step)
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(kept))
        beside.replace(path)
        self._file = path.open("a")

        def make(name: str) -> Tracker:
            return SERVICES[name](importlib.import_module(name), project, _run_name(folder), config or {})

        services = [Guarded(name, partial(make, name), say) for name in trackers]
        self._trackers: list[Tracker] = [TensorBoard(folder / "tensorboard", after_step), *services]

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def step(self, record: StepRecord) -> None:
        """Write a step."""
        self._write({"kind": "step", **asdict(record), "mfu": record.mfu})
        self._draw(record.step, {f"train/{name}": value for name, value in record.scalars().items()})

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write an evaluation after ``step`` steps."""
        self._write({"kind": "evaluation", "step": step, **asdict(evaluation)})
        self._draw(step, {"held_out/loss": evaluation.loss})

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.scalars(step, values)

    def _write(self, record: dict[str, object]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def _run_name(folder: Path) -> str:
    """What services call the run: its folder's name, with what tells it from others of that name and stays when it resumes."""
    path = folder.resolve()
    return f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _records_until(path: Path, step: int) -> list[str]:
    """The whole lines of a metrics file that are about the first ``step`` steps."""
    if step == 0 or not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if json.loads(line)["step"] <= step]
