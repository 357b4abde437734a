"""What is known of a step, as a line for the terminal, a JSON line and TensorBoard scalars."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from infinipipe.plan import ChunkKind, Plan


@dataclass(frozen=True)
class PlanSummary:
    """What a plan was made of: chunks by kind, pipelines, and the slices of the most finely cut sequence."""

    split: int
    batched: int
    hybrid: int
    pipelines: int
    most_slices: int

    @classmethod
    def of(cls, plan: Plan) -> PlanSummary:
        kinds = Counter(chunk.kind for chunk in plan.all_chunks())
        pipelines = [pipeline for replica in plan.replicas for pipeline in replica.pipelines]
        return cls(
            split=kinds[ChunkKind.SPLIT],
            batched=kinds[ChunkKind.BATCHED],
            hybrid=kinds[ChunkKind.HYBRID],
            pipelines=len(pipelines),
            most_slices=max((pipeline.num_splits for pipeline in pipelines), default=0),
        )

    def __str__(self) -> str:
        return (
            f"{self.split} split {self.batched} batched {self.hybrid} hybrid chunks, "
            f"{self.pipelines} pipeline{'s' * (self.pipelines != 1)}, most slices {self.most_slices}"
        )


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: its number, from 1.
        loss: mean token loss, in nats.
        tokens: of the global batch.
        seconds: from asking for the batch to the end of the optimizer's work, waiting for the plan included; what comes
            between steps (evaluation, the snapshot for a checkpoint) and the writing of timelines are not.
        gradient_norm: before clipping.
        learning_rate: that was used.
        peak_bytes: most live activation bytes of every stage.
        plan: what it was made of.
        plan_hash: of the plan.
        planning_seconds: what making the plan took.
        plan_wait_seconds: how long the step waited for it.
        plan_late: whether a quick plan took the place of one that did not come in time.
        sources: tokens that each source of the corpus gave.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    gradient_norm: float
    learning_rate: float
    peak_bytes: list[int]
    plan: PlanSummary
    plan_hash: str
    planning_seconds: float = 0.0
    plan_wait_seconds: float = 0.0
    plan_late: bool = False
    sources: dict[str, int] = field(default_factory=dict)

    def line(self, num_steps: int) -> str:
        """The step in one line."""
        peaks = "+".join(f"{peak / 2**20:.0f}" for peak in self.peak_bytes)
        return (
            f"step {self.step:{len(str(num_steps))}}/{num_steps}  loss {self.loss:.4f}  "
            f"{self.tokens / self.seconds:,.0f} tokens/s  norm {self.gradient_norm:.3f}  "
            f"activations {peaks} MiB  {self.tokens} tokens{self._shares()}: {self.plan}"
        )

    def _shares(self) -> str:
        """What came from each source, where there are several."""
        if len(self.sources) < 2:
            return ""
        return f" ({', '.join(f'{name} {tokens}' for name, tokens in self.sources.items())})"


@dataclass(frozen=True)
class Evaluation:
    """The mean loss, in nats, over ``tokens`` supervised tokens of held-out sequences."""

    loss: float
    tokens: int


class MetricsWriter:
    """Writes ``metrics.jsonl`` and ``tensorboard/`` in ``folder``.

    What is there of the first ``after_step`` steps stays; what an earlier run did after them is replaced or hidden.
    """

    def __init__(self, folder: Path, *, after_step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = _records_until(path, after_step)
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(kept))
        beside.replace(path)
        self._file = path.open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after_step + 1 if after_step else 0)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._board.close()

    def step(self, record: StepRecord) -> None:
        """Write a step."""
        self._write({"kind": "step", **asdict(record)})
        scalars = {
            "loss": record.loss,
            "tokens_per_second": record.tokens / record.seconds,
            "gradient_norm": record.gradient_norm,
            "learning_rate": record.learning_rate,
            "most_slices": record.plan.most_slices,
            "planning_seconds": record.planning_seconds,
            "plan_wait_seconds": record.plan_wait_seconds,
        }
        scalars |= {f"peak_bytes/stage{stage}": peak for stage, peak in enumerate(record.peak_bytes)}
        scalars |= {f"tokens/{name}": tokens for name, tokens in record.sources.items()}
        for name, value in scalars.items():
            self._board.add_scalar(f"train/{name}", value, record.step)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write an evaluation after ``step`` steps."""
        self._write({"kind": "evaluation", "step": step, **asdict(evaluation)})
        self._board.add_scalar("held_out/loss", evaluation.loss, step)

    def _write(self, record: dict[str, object]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def _records_until(path: Path, step: int) -> list[str]:
    """The whole lines of a metrics file that are about the first ``step`` steps."""
    if step == 0 or not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if json.loads(line)["step"] <= step]
