"""What is known of a step: its record, a line for the terminal, and scalars for curves."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import timedelta

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
        tokens: of the global batch; there is no padding.
        seconds: from asking for the batch to the end of the optimizer's work, waiting for the plan included; what comes
            between steps (evaluation, the snapshot for a checkpoint) and the writing of timelines are not.
        gradient_norm: before clipping.
        learning_rate: that was used for parameters of no group.
        peak_bytes: most live activation bytes of every stage.
        memory_bytes: these with the states of weights, gradients and optimizer.
        memory_budget: bytes that a plan may use, if limited.
        flops_per_second: of the model, by one device, see :mod:`infinipipe.cost.model_flops`.
        peak_flops: that one device can do, if known.
        idle: measured share of all processes' time, until the last action of any, in which they computed nothing.
        predicted_seconds: of the plan, without the optimizer's.
        predicted: shares of all devices' time: bubble, messages, recompute.
        plan: what it was made of.
        plan_hash: of the plan.
        planning_seconds: what making the plan took.
        plan_wait_seconds: how long the step waited for it.
        plan_late: whether a quick plan took the place of one that did not come in time.
        data_wait_seconds: how long the step waited for sequences to be drawn.
        sources: tokens that each source of the corpus gave.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    gradient_norm: float
    learning_rate: float
    peak_bytes: list[int]
    memory_bytes: list[int]
    memory_budget: int | None
    flops_per_second: float
    peak_flops: float | None
    idle: float
    predicted_seconds: float
    predicted: dict[str, float]
    plan: PlanSummary
    plan_hash: str
    planning_seconds: float = 0.0
    plan_wait_seconds: float = 0.0
    plan_late: bool = False
    data_wait_seconds: float = 0.0
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the model's operations as a share of what the devices can do."""
        return self.flops_per_second / self.peak_flops if self.peak_flops else None

    @property
    def budget_share(self) -> float | None:
        """The most memory of any stage as a share of the budget."""
        return max(self.memory_bytes) / self.memory_budget if self.memory_budget else None

    def line(self, num_steps: int, left: float) -> str:
        """The step in one line, with ``left`` seconds to go."""
        peaks = "+".join(f"{peak / 2**20:.0f}" for peak in self.peak_bytes)
        mfu = "" if self.mfu is None else f"MFU {self.mfu:.1%}  "
        budget = "" if self.budget_share is None else f", {self.budget_share:.0%} of the budget"
        return (
            f"step {self.step:{len(str(num_steps))}}/{num_steps}  loss {self.loss:.4f}  {self.seconds:.2f} s  "
            f"{self.tokens_per_second:,.0f} tokens/s  {mfu}norm {self.gradient_norm:.3f}  rate {self.learning_rate:.3g}  "
            f"idle {self.idle:.0%}  activations {peaks} MiB{budget}  {timedelta(seconds=round(left))} left  "
            f"{self.tokens} tokens{self._shares()}: {self.plan}"
        )

    def scalars(self) -> dict[str, float]:
        """What is drawn as curves, by name."""
        known = {"mfu": self.mfu, "memory_of_budget": self.budget_share}
        return {
            "loss": self.loss,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "flops_per_second": self.flops_per_second,
            "gradient_norm": self.gradient_norm,
            "learning_rate": self.learning_rate,
            "idle": self.idle,
            "predicted_seconds": self.predicted_seconds,
            "most_slices": self.plan.most_slices,
            "planning_seconds": self.planning_seconds,
            "plan_wait_seconds": self.plan_wait_seconds,
            "data_wait_seconds": self.data_wait_seconds,
            **{name: value for name, value in known.items() if value is not None},
            **{f"predicted/{name}": share for name, share in self.predicted.items()},
            **{f"peak_bytes/stage{stage}": peak for stage, peak in enumerate(self.peak_bytes)},
            **{f"memory_bytes/stage{stage}": size for stage, size in enumerate(self.memory_bytes)},
            **{f"tokens/{name}": tokens for name, tokens in self.sources.items()},
        }

    def _shares(self) -> str:
        """What came from each source, where there are several."""
        if len(self.sources) < 2:
            return ""
        return f" ({', '.join(f'{name} {tokens}' for name, tokens in self.sources.items())})"


class Pace:
    """How long a run still takes: what lies between its latest steps, evaluations and checkpoints included.

    Args:
        num_steps: the run's last.
        window: steps over which the mean is taken.
    """

    def __init__(self, num_steps: int, window: int = 32) -> None:
        self._num_steps = num_steps
        self._ends: deque[float] = deque(maxlen=window + 1)

    def left(self, record: StepRecord, now: float) -> float:
        """Seconds that are left after a step that ended at ``now``; the first step is taken for all others."""
        if not self._ends:
            self._ends.append(now - record.seconds)
        self._ends.append(now)
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return pace * (self._num_steps - record.step)


@dataclass(frozen=True)
class Evaluation:
    """The mean loss, in nats, over ``tokens`` supervised tokens of held-out sequences."""

    loss: float
    tokens: int
