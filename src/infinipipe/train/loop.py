"""The training loop: a batch, its plan, the step on all stages, the optimizer; evaluation and the checkpoint at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from infinipipe.data import BatchSampler, Corpus, Sequences, open_corpus
from infinipipe.model import build_stage, split_layers
from infinipipe.plan import Plan
from infinipipe.runtime import (
    Batch,
    Executor,
    Layout,
    MemoryMeter,
    Mesh,
    Parameters,
    clip_gradients,
    sync_tied_gradients,
)
from infinipipe.train.checkpoint import save_checkpoint
from infinipipe.train.console import Console
from infinipipe.train.job import Job
from infinipipe.train.metrics import MetricsWriter, PlanSummary, StepRecord
from infinipipe.train.model import model_config
from infinipipe.train.optimizer import build_optimizer, learning_rate
from infinipipe.train.place import Place
from infinipipe.train.planning import StepPlanner
from infinipipe.train.settings import Settings
from infinipipe.verify import self_check


class DivergedError(ValueError):
    """Loss or gradient is not finite; the weights are those of the step before."""


def train(settings: Settings, place: Place, *, settings_text: str) -> None:
    """Train as ``settings`` say; every process of the job calls this. ``settings_text`` is kept beside the results.

    Raises ``ValueError`` for whatever the user can mend.
    """
    job = Job.start(place, settings.parallel)
    console = Console(quiet=not job.is_first)
    corpus = _open_corpus(job, settings, console)
    vocab_size = job.on_first(lambda: len(_of_first(corpus).tokenizer))
    config = job.everywhere(lambda: model_config(settings.model, vocab_size))
    job.on_first(lambda: self_check(config))
    trainer = Trainer(job, settings, config)
    output = Path(settings.train.output)
    if corpus is None:
        trainer.run(None, console, None)
    else:
        output.mkdir(parents=True, exist_ok=True)
        (output / "settings.yaml").write_text(settings_text)
        with MetricsWriter(output) as metrics:
            trainer.run(corpus, console, metrics)
    tokenizer = None if corpus is None else corpus.tokenizer
    save_checkpoint(output / "checkpoint", job, trainer.stage, trainer.parameters, trainer.config, tokenizer)
    console.say(f"wrote {output / 'checkpoint'}")
    job.close()


def _of_first(corpus: Corpus | None) -> Corpus:
    assert corpus is not None, "only rank 0 asks for the corpus"
    return corpus


def _open_corpus(job: Job, settings: Settings, console: Console) -> Corpus | None:
    """The corpus on rank 0; the others wait until it is there."""
    corpus: Corpus | None = None

    def opened() -> None:
        nonlocal corpus
        with console.progress() as progress:
            corpus = open_corpus(settings.data, settings.tokenizer, progress)

    job.on_first(opened)
    if corpus is not None:
        for line in corpus.report:
            console.say(line)
        console.say(
            f"{len(corpus.train)} sequences to train on, {len(corpus.held_out)} held out; "
            f"unigram entropy {corpus.unigram_entropy:.4f} nats per token"
        )
    return corpus


@dataclass(frozen=True)
class Evaluation:
    """The mean loss over ``tokens`` supervised tokens."""

    loss: float
    tokens: int


class Trainer:
    """The parts of one process and the steps that it does with them."""

    def __init__(self, job: Job, settings: Settings, config: PretrainedConfig) -> None:
        self.job = job
        self.settings = settings
        self.config = config
        self.stage_layers = job.everywhere(
            lambda: split_layers(config.num_hidden_layers, settings.parallel.stages, settings.parallel.stage_layers)
        )
        model = settings.model
        self.stage = job.everywhere(
            lambda: build_stage(
                config,
                self.stage_layers,
                job.rank,
                dtype=getattr(torch, model.dtype),
                device=job.device,
                seed=settings.train.seed,
                checkpoint=model.path if model.weights == "load" else None,
            )
        )
        self.parameters = Parameters(self.stage)
        self._mesh = Mesh(Layout(stages=settings.parallel.stages), job.device.type)
        self._executor = Executor(
            self.stage,
            self._mesh.transport(),
            self.parameters,
            loss_block_tokens=settings.train.loss_block_tokens,
        )
        self._optimizer = build_optimizer((p for _, p in self.parameters.named()), settings.optimizer)
        self._planner = job.everywhere(lambda: StepPlanner(settings, config, self.stage_layers))
        self._meter = MemoryMeter()

    def run(self, corpus: Corpus | None, console: Console, metrics: MetricsWriter | None) -> None:
        """All steps, with evaluations; ``corpus`` and ``metrics`` are rank 0's."""
        settings = self.settings
        num_steps, every = settings.train.stop_after or settings.train.steps, settings.train.evaluate_every
        batches = None if corpus is None else global_batches(corpus.train, settings)
        self._say_model(console)
        for step in range(num_steps):
            record = self.step(step, batches)
            console.say(record.line(num_steps))
            if metrics is not None:
                metrics.step(record)
            if step + 1 == num_steps or (every and (step + 1) % every == 0):
                evaluation = self.evaluate(None if corpus is None else corpus.held_out)
                if evaluation is not None:
                    console.say(f"held-out loss {evaluation.loss:.4f} over {evaluation.tokens} tokens")
                    if metrics is not None:
                        metrics.evaluation(step + 1, evaluation.loss, evaluation.tokens)
        if corpus is not None and evaluation is not None:
            console.say(
                f"held-out loss {evaluation.loss:.4f}, unigram entropy {corpus.unigram_entropy:.4f}: "
                f"{corpus.unigram_entropy - evaluation.loss:.4f} nats per token better"
            )

    def step(self, step: int, batches: Iterator[Batch] | None) -> StepRecord:
        """One optimizer step, ``step`` counted from 0, on the next of ``batches``, which are rank 0's.

        Raises ``DivergedError`` before the weights change if the loss or a gradient is not finite.
        """
        start = time.perf_counter()
        plan, batch = self.job.share_step(lambda: self._next_planned(batches))
        self.parameters.zero_grad()
        with self._measured():
            result = self._executor.step(plan.replicas[0], batch)
        sync_tied_gradients(self.stage, self.parameters, self._mesh)
        norm = clip_gradients(self.stage, self.parameters, self._mesh, self.settings.optimizer.max_norm or math.inf)
        parts = self.job.gather_objects((result.loss_sum, self._peak_bytes()))
        loss = sum(part[0] for part in parts) / batch.num_supervised
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise DivergedError(
                f"step {step + 1}: the loss is {loss:g} and the gradient norm {norm:g}; the weights were left as they were "
                "before the step; lower optimizer.learning_rate or raise optimizer.warmup_steps"
            )
        rate = learning_rate(step, self.settings.train.steps, self.settings.optimizer)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.parameters.publish()
        return StepRecord(
            step=step + 1,
            loss=loss,
            tokens=plan.num_tokens,
            seconds=time.perf_counter() - start,
            gradient_norm=norm,
            learning_rate=rate,
            peak_bytes=[part[1] for part in parts],
            plan=PlanSummary.of(plan),
            plan_hash=plan.hash,
        )

    def evaluate(self, held_out: Sequences | None) -> Evaluation | None:
        """Mean loss on held-out sequences, rank 0's, by forwards through the same pipeline; ``None`` if there are none."""
        limit = self.settings.train.evaluate_sequences
        count = self.job.on_first(lambda: 0 if held_out is None else min(len(held_out), limit))
        loss_sum, tokens = 0.0, 0
        starts = range(0, count, self.settings.data.sequences_per_step)
        groups = iter([range(a, min(a + self.settings.data.sequences_per_step, count)) for a in starts])
        for _ in starts:
            plan, batch = self.job.share_step(lambda: self._planned(held_out, next(groups)))
            loss_sum += self._executor.evaluate(plan.replicas[0], batch).loss_sum
            tokens += batch.num_supervised
        total = sum(self.job.gather_objects(loss_sum))
        return Evaluation(total / tokens, tokens) if tokens else None

    def _next_planned(self, batches: Iterator[Batch] | None) -> tuple[Plan, Batch]:
        assert batches is not None, "rank 0 has the batches"
        return self._with_plan(next(batches))

    def _planned(self, sequences: Sequences | None, chosen: range) -> tuple[Plan, Batch]:
        assert sequences is not None, "rank 0 has the held-out sequences"
        return self._with_plan(make_batch(sequences, list(chosen)))

    def _with_plan(self, batch: Batch) -> tuple[Plan, Batch]:
        if batch.num_supervised == 0:
            raise ValueError(
                "a global batch has no token to learn, only prompts or single tokens; raise data.sequences_per_step"
            )
        return self._planner.plan([len(tokens) for tokens in batch.tokens]), batch

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Watch live activation bytes: by the allocator on CUDA, by the operators on the CPU."""
        if self.job.device.type == "cuda":
            self._base_bytes = torch.cuda.memory_allocated(self.job.device)
            torch.cuda.reset_peak_memory_stats(self.job.device)
            yield
        else:
            self._meter.reset_peak()
            with self._meter:
                yield

    def _peak_bytes(self) -> int:
        if self.job.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.job.device) - self._base_bytes
        return self._meter.peak

    def _say_model(self, console: Console) -> None:
        counts = self.job.gather_objects(sum(p.numel() for _, p in self.parameters.named()))
        console.say(
            f"{self.config.model_type} model of {sum(counts) / 1e6:.1f}M weights, "
            f"{'+'.join(map(str, self.stage_layers))} layers on {len(self.stage_layers)} stages, {self.settings.model.dtype}"
        )


def make_batch(sequences: Sequences, chosen: list[int]) -> Batch:
    """Tokens and labels of the sequences of those indices."""
    return Batch(
        [torch.from_numpy(sequences.tokens(index)) for index in chosen],
        [torch.from_numpy(sequences.labels(index)) for index in chosen],
    )


def global_batches(sequences: Sequences, settings: Settings) -> Iterator[Batch]:
    """The global batches of a run, without end."""
    sampler = BatchSampler(
        sequences.lengths,
        sequences_per_step=settings.data.sequences_per_step,
        tokens_per_step=settings.data.tokens_per_step,
        seed=settings.train.seed,
    )
    while True:
        yield make_batch(sequences, sampler.next())
