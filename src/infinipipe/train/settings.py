"""Settings of a training run: the model, its plan and its processes, the optimizer, the loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from infinipipe.cost import GatherPolicy, GradientPolicy
from infinipipe.data.settings import DataSettings, TokenizerSettings
from infinipipe.plan import Placement, PlanError, placement_named
from infinipipe.planner import PlannerChoices
from infinipipe.settings import SettingError, require_above, require_range
from infinipipe.train.optimizer_settings import OptimizerSettings


@dataclass(frozen=True)
class ModelSettings:
    """The causal language model, by a Hugging Face configuration.

    Attributes:
        path: a Hugging Face model directory or config.json; if empty, the model is described by config alone
        config: fields of the Hugging Face configuration, model_type among them if there is no path; they replace those of path, tables field by field. rope_scaling and rope_theta are taken for the rope_parameters that they are. vocab_size and the ids of special tokens are the tokenizer's if there is no path and they are not given
        weights: load starts from the safetensors in path, random from train.seed
        ignore: patterns of names of tensors in path's safetensors that the model has no place for and that are not needed; * matches any characters
        dtype: of the computing; bfloat16 keeps float32 master weights
    """

    path: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    weights: Literal["load", "random"] = "random"
    ignore: list[str] = field(default_factory=list)
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if not self.path and not isinstance(self.config.get("model_type"), str):
            raise SettingError("model needs a path, or a config with a model_type such as llama")
        if self.ignore and self.weights != "load":
            raise SettingError("model.ignore names tensors of a checkpoint, but model.weights is random; remove it")
        if self.weights == "load" and not self.path:
            raise SettingError(
                "model.weights is load, but there is no model.path to load from; set one or choose random"
            )


@dataclass(frozen=True, kw_only=True)
class PlanSettings(PlannerChoices):
    """How each step is cut into chunks, scheduled and recomputed.

    Attributes:
        flops_per_second: what one device reaches, for the planner's estimate of time
        chunk_seconds: fixed time of a chunk over all stages, for the same; the larger, the fewer chunks
        cost: cost file that infinipipe profile has written for this model and these stages, in place of that estimate
        ahead: steps that are planned ahead, in a process beside the training; 0 plans each step on the spot
        patience: seconds that a step waits for its plan before a quick one takes its place; 0 waits as long as it takes, so that equal runs have equal plans
    """

    flops_per_second: float = 5e10
    chunk_seconds: float = 0.02
    cost: str = ""
    ahead: int = 1
    patience: float = 0.0

    def __post_init__(self) -> None:
        try:
            self.planner_settings()
        except PlanError as error:
            raise SettingError(f"plan.{error}") from None
        require_above("plan.flops_per_second", self.flops_per_second, 0)
        require_range("plan.chunk_seconds", self.chunk_seconds, at_least=0)
        require_range("plan.ahead", self.ahead, at_least=0)
        require_range("plan.patience", self.patience, at_least=0)


@dataclass(frozen=True)
class ParallelSettings:
    """Processes and what each is given.

    Attributes:
        stages: pipeline stages
        sequence_parallel: processes that share the tokens and the states of every stage
        replicas: data-parallel copies of the pipeline, among which each step's sequences are divided
        mesh_order: from what ranks far apart differ in to what neighbouring ranks do, which are of one machine
        gather_policy: whether parameters that processes share stay gathered through a step, or are released after each use
        gradient_policy: where sequence_parallel is above 1, whether a stage's gradients accumulate whole and are reduced once a step, or only as shards, to which each chunk's are reduced layer by layer: less memory, more messages
        placement: which parts of the model (virtual stages) lie on which stage: plain, one part on each; interleaved, part k on stage k mod stages; v, there and back, which leaves embedding and head on one stage
        parts_per_stage: parts on each stage; if not given, 1 where the placement is plain, else 2
        stage_layers: decoder layers of every part, which is every stage where the placement is plain; if not given, those of plan.cost, else such that all take equal time for the training data
        device: auto takes CUDA where there is a device for every process, else the CPU
        threads: of each process on the CPU
    """

    stages: int = 1
    sequence_parallel: int = 1
    replicas: int = 1
    mesh_order: list[Literal["replica", "stage", "sequence"]] = field(
        default_factory=lambda: ["replica", "stage", "sequence"]
    )
    gather_policy: GatherPolicy = "keep"
    gradient_policy: GradientPolicy = "whole"
    placement: Literal["plain", "interleaved", "v"] = "plain"
    parts_per_stage: int | None = None
    stage_layers: list[int] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("stages", "sequence_parallel", "replicas", "threads"):
            require_range(f"parallel.{name}", getattr(self, name), at_least=1)
        if self.parts_per_stage is not None:
            require_range("parallel.parts_per_stage", self.parts_per_stage, at_least=1)
        try:
            _ = self.placed
        except ValueError as error:
            raise SettingError(f"parallel.placement with parallel.parts_per_stage: {error}") from None
        if sorted(self.mesh_order) != ["replica", "sequence", "stage"]:
            raise SettingError(
                f"parallel.mesh_order is {', '.join(self.mesh_order) or 'empty'}; it must name each of replica, stage and "
                "sequence once"
            )

    @property
    def placed(self) -> Placement:
        """The parts of every stage."""
        per_stage = self.parts_per_stage or (1 if self.placement == "plain" else 2)
        return placement_named(self.placement, self.stages, per_stage)

    @property
    def num_processes(self) -> int:
        """Processes of the job."""
        return self.replicas * self.stages * self.sequence_parallel

    def name_of(self, rank: int) -> str:
        """A rank with its place, such as ``rank 3 (replica 1, stage 1)``; what there is only one of is left out."""
        sizes: dict[str, int] = {"replica": self.replicas, "stage": self.stages, "sequence": self.sequence_parallel}
        places: dict[str, int] = {}
        rest = rank
        for name in reversed(self.mesh_order):
            rest, places[name] = divmod(rest, sizes[name])
        shown = [f"{name} {places[name]}" for name in sizes if name == "stage" or sizes[name] > 1]
        return f"rank {rank} ({', '.join(shown)})"

    @property
    def layout(self) -> str:
        """The layout in words; what there is only one of is left out, stages excepted."""
        sizes = [(self.replicas, "replicas"), (self.stages, "stages"), (self.sequence_parallel, "sequence-parallel")]
        shown = [f"{size} {name}" for size, name in sizes if size > 1 or name == "stages"]
        parts = "" if self.placed.is_plain else f" of {len(self.placed.parts[0])} parts ({self.placement})"
        return " x ".join(shown).replace("1 stages", "1 stage").replace("stages", f"stages{parts}", 1)

    def describe(self) -> str:
        """The number of processes and where it comes from."""
        sizes = [("stages", self.stages), ("sequence_parallel", self.sequence_parallel), ("replicas", self.replicas)]
        given = " and ".join(f"parallel.{name} is {size}" for name, size in sizes if size > 1) or "parallel.stages is 1"
        return f"{given}, which takes {self.num_processes} process{'es' * (self.num_processes > 1)}"


@dataclass(frozen=True)
class TrainSettings:
    """The training loop.

    Attributes:
        output: folder of the run: logs, metrics, checkpoints and at the end the Hugging Face model
        steps: optimizer steps, over which the learning rate takes its course
        stop_after: if above 0, the run ends after so many of them, counted from the first step of all
        seed: of random weights and of the order of sequences
        evaluate_every: steps between evaluations on held-out documents; 0 evaluates at the end only
        evaluate_sequences: held-out documents of an evaluation, the first ones of a fixed order
        export_dtype: what the Hugging Face model at the end is written in; source is what the weights in model.path are stored in, or float32, that of the master weights, if they were random
        loss_block_tokens: tokens whose logits exist at once on the last stage
        checkpoint_every: steps between checkpoints to resume from, with another at the end; 0 saves only when the run is asked to stop
        keep_checkpoints: how many of the newest are kept
        checkpoint_mode: async goes on training while a checkpoint is written, sync waits for it
        resume: auto goes on from the newest valid checkpoint in output, if there is one; never starts anew and sets earlier ones aside; else the path of a checkpoint
        trackers: services that get the metrics too, besides metrics.jsonl and TensorBoard: wandb, mlflow, trackio; their packages must be installed
        project: what the run belongs to there; its name is that of the folder output
        peak_flops: floating-point operations that one device can do in a second, of which MFU is the share in use; if not given, the data sheet's for the GPUs that are known, and no MFU on others
        timeout: seconds without progress of any process after which the run ends
        timeline_steps: steps, counted from 1, whose measured and predicted timelines, with a page and a picture of both, go to the folder timelines in output
    """

    output: str = "runs/train"
    steps: int = 100
    stop_after: int = 0
    seed: int = 0
    evaluate_every: int = 0
    evaluate_sequences: int = 16
    export_dtype: Literal["source", "float32", "bfloat16", "float16"] = "source"
    loss_block_tokens: int = 1024
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    checkpoint_mode: Literal["async", "sync"] = "async"
    resume: str = "auto"
    trackers: list[Literal["wandb", "mlflow", "trackio"]] = field(default_factory=list)
    project: str = "infinipipe"
    peak_flops: float | None = None
    timeout: float = 900.0
    timeline_steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.output:
            raise SettingError("train.output is empty; name a folder for the run")
        require_range("train.steps", self.steps, at_least=1)
        require_range("train.stop_after", self.stop_after, at_least=0, at_most=self.steps)
        require_range("train.seed", self.seed, at_least=0, at_most=2**63 - 1)
        require_range("train.evaluate_every", self.evaluate_every, at_least=0)
        require_range("train.evaluate_sequences", self.evaluate_sequences, at_least=1)
        require_range("train.loss_block_tokens", self.loss_block_tokens, at_least=1)
        require_range("train.checkpoint_every", self.checkpoint_every, at_least=0)
        require_range("train.keep_checkpoints", self.keep_checkpoints, at_least=1)
        require_above("train.timeout", self.timeout, 0)
        if self.peak_flops is not None:
            require_above("train.peak_flops", self.peak_flops, 0)
        for package in self.trackers:
            if find_spec(package) is None:
                raise SettingError(
                    f"train.trackers names {package}, which is not installed; run 'pip install {package}', or leave it out"
                )
        for step in self.timeline_steps:
            require_range("train.timeline_steps", step, at_least=1)
        if not self.resume:
            raise SettingError("train.resume is empty; give auto, never or the path of a checkpoint")

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return self.stop_after or self.steps


@dataclass(frozen=True)
class Settings:
    """Everything that decides a training run.

    Attributes:
        model: the language model
        tokenizer: how text becomes tokens
        data: the documents and the global batches
        plan: how each step is cut, packed, scheduled and recomputed
        parallel: processes
        optimizer: the optimizer, its schedule and its parameter groups
        train: the loop
    """

    model: ModelSettings
    data: DataSettings
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
