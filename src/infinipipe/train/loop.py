"""The training loop: from settings to a trained model, through interruptions."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from infinipipe.cost import typical_length
from infinipipe.data import Corpus, Progress, open_corpus
from infinipipe.model import model_fields
from infinipipe.train.assets import Provenance
from infinipipe.train.card import is_model_of
from infinipipe.train.checkpoint import Checkpoints
from infinipipe.train.console import Console
from infinipipe.train.environment import ProcessEnvironment
from infinipipe.train.errors import REPORTS
from infinipipe.train.export import save_model
from infinipipe.train.heartbeat import WAITING, Announce, Heartbeat, Watchdog, announce_nothing
from infinipipe.train.interrupt import STOPPED, StopRequest
from infinipipe.train.job import Job, OnFirst
from infinipipe.train.leader import Leader
from infinipipe.train.loader import TrainingBatch
from infinipipe.train.lock import OutputLock
from infinipipe.train.model import StartModel, Vocabulary, open_model
from infinipipe.train.resume import changes_on_resume, require_same_model
from infinipipe.train.schedule import schedule_remarks
from infinipipe.train.settings import Settings, TrainSettings
from infinipipe.train.startup import check_start, check_worst
from infinipipe.train.store import CheckpointError, CheckpointFolder, Manifest, read_manifest
from infinipipe.train.trainer import Trainer


def train(settings: Settings, process: ProcessEnvironment, *, settings_text: str) -> int:
    """Train as ``settings`` say; every process of the job calls this. ``settings_text`` is kept beside the results.

    Returns the exit code: 0, or ``STOPPED`` if a signal ended the run early. Raises ``ValueError`` for what the user can mend.
    """
    output = Path(settings.train.output)
    lock = OutputLock(output) if process.rank == 0 and REPORTS not in os.environ else None
    heartbeat = Heartbeat(output / "logs", process.rank)
    watchdog = Watchdog(heartbeat, process.world_size, settings.train.timeout, settings.parallel.name_of)
    job = Job.start(process, settings.parallel)
    with StopRequest() as stop:
        code = Run(job, settings, settings_text, heartbeat.doing, stop).execute()
    heartbeat.doing(f"{WAITING} for the end of the job")
    job.close()
    watchdog.stop()
    if lock is not None:
        lock.release()
    return code


@dataclass(frozen=True)
class _Start:
    """Where a run starts: steps done, position of the data, and the checkpoint with the rest."""

    step: int = 0
    position: dict[str, Any] | None = None
    checkpoint: Path | None = None


class Run:
    """One run of the loop by one process of a job.

    Args:
        settings_text: the settings as YAML, to be kept.
        announce: told what this process does.
        stop: asks the run to end early.
    """

    def __init__(
        self,
        job: Job,
        settings: Settings,
        settings_text: str = "",
        announce: Announce = announce_nothing,
        stop: StopRequest | None = None,
    ) -> None:
        self._job, self._settings = job, settings
        self._text = settings_text
        self._announce = announce
        self._stop = stop or StopRequest()
        self._console = Console(quiet=not job.is_first)
        self._output = Path(settings.train.output)
        self._folder = CheckpointFolder(self._output / "checkpoints", settings.train.keep_checkpoints)

    def execute(self) -> int:
        """Train, from a checkpoint if there is one to resume from, and export the model; returns the exit code."""
        job, settings = self._job, self._settings
        self._announce(f"{WAITING} for the settings to be checked")
        model = job.on_first(lambda: check_start(settings))
        self._announce(f"{WAITING} for the corpus")
        corpus = OnFirst.make(job, self._open_corpus)
        if not settings.model.path:
            vocabulary = corpus.ask(lambda corpus: Vocabulary.of(corpus.tokenizer))
            model = job.on_first(lambda: open_model(settings, vocabulary))
        for line in model.report:
            self._console.say(line)
        config = model.config
        corpus.ask(lambda corpus: corpus.require_ids_below(config.vocab_size))
        length = corpus.ask(lambda corpus: typical_length(corpus.train.lengths))
        trainer = Trainer(job, settings, config, length, self._announce)
        checkpoints = Checkpoints(
            self._folder,
            job,
            trainer.mesh,
            trainer.stage,
            trainer.parameters,
            trainer.optimizer,
            background=settings.train.checkpoint_mode == "async",
        )
        self._console.say(trainer.describe())
        for line in trainer.groups.describe():
            self._console.say(line)
        for line in schedule_remarks(settings.train.steps, settings.optimizer):
            self._console.say(f"warning: {line}")
        self._announce(f"{WAITING} for the worst batch to be planned")
        self._console.say(corpus.ask(lambda corpus: check_worst(trainer.planner, corpus, settings.data)))
        start = self._resume(trainer, checkpoints)
        with ExitStack() as stack:
            stack.callback(checkpoints.close)
            leader = corpus.then(lambda corpus: self._leader(corpus, model, trainer, start))
            stack.callback(leader.tell, Leader.close)
            stopped = self._steps(trainer, checkpoints, start, leader)
        if stopped:
            return STOPPED
        self._write_model(trainer, start)
        return 0

    def _write_model(self, trainer: Trainer, start: _Start) -> None:
        """Write the model of the last step, unless the run is beyond that, or it is there."""
        folder, last = self._output / "checkpoint", self._settings.train.last_step
        if start.step > last:
            self._console.say(
                f"no model is written; 'infinipipe export {self._output} OUTPUT' writes that of a checkpoint"
            )
            return
        if start.step == last and self._job.on_first(lambda: self._has_model(folder, last)):
            self._console.say(f"the model after step {last} is in {folder} already")
            return
        self._announce("writing the model")
        save_model(
            folder,
            self._job,
            trainer.mesh,
            trainer.stage,
            trainer.parameters,
            trainer.config,
            step=last,
            settings=self._text,
        )
        self._console.say(f"wrote {folder}")

    def _has_model(self, folder: Path, step: int) -> bool:
        provenance = Provenance.load(self._output)
        return provenance is not None and is_model_of(folder, provenance, step)

    def _leader(self, corpus: Corpus, model: StartModel, trainer: Trainer, start: _Start) -> Leader:
        return Leader(
            corpus,
            model,
            self._settings,
            trainer.planner,
            text=self._text,
            step=start.step,
            position=start.position,
            console=self._console,
            announce=self._announce,
        )

    def _steps(self, trainer: Trainer, checkpoints: Checkpoints, start: _Start, leader: OnFirst[Leader]) -> bool:
        """All steps with evaluations and checkpoints; whether a signal ended them early."""
        settings, say = self._settings.train, self._console.say
        last, every = settings.last_step, settings.checkpoint_every
        if start.step >= last:
            say(_nothing_to_do(start.step, settings))
        for number in range(start.step + 1, last + 1):
            record, taken = trainer.step(number, leader)
            leader.tell(partial(Leader.record_step, record=record))
            stopped = any(self._job.gather_objects(self._stop.asked)) and number < last
            self._warn(checkpoints.poll())
            if stopped or (every and (number == last or number % every == 0)):
                self._save(checkpoints, self._manifest(number, taken, trainer), must=stopped or number == last)
            # After saving: an evaluation that fails loses no step.
            if number == last or (settings.evaluate_every and number % settings.evaluate_every == 0):
                evaluation = trainer.evaluate(leader)
                if evaluation is not None:
                    leader.tell(partial(Leader.record_evaluation, step=number, evaluation=evaluation))
            if stopped:
                say(f"stopped after step {number} as asked; start again to go on from there")
                return True
        return False

    def _save(self, checkpoints: Checkpoints, manifest: Manifest, *, must: bool) -> None:
        """Save; where this checkpoint ``must`` be safe afterwards, a failure is raised, else it is a warning."""
        self._announce("saving a checkpoint")
        self._warn(checkpoints.finish())
        failure = checkpoints.save(manifest, wait=must)
        if failure is not None and must:
            self._job.stop(CheckpointError(f"{failure}; make room or name another train.output, and start again"))
        self._warn(failure)

    def _warn(self, failure: str | None) -> None:
        if failure is not None:
            self._console.say(f"warning: {failure}; training goes on")

    def _manifest(self, step: int, taken: TrainingBatch, trainer: Trainer) -> Manifest:
        layout = self._settings.parallel.layout
        return Manifest(step, taken.position, trainer.config.to_dict(), layout, self._text, files={})

    def _resume(self, trainer: Trainer, checkpoints: Checkpoints) -> _Start:
        """Load the checkpoint to go on from, if any. Raises ``CheckpointError`` for one that cannot be used."""
        start = self._job.on_first(lambda: self._choose(trainer))
        if start.checkpoint is not None:
            path = start.checkpoint
            self._announce(f"reading the checkpoint {path}")
            self._job.everywhere(lambda: checkpoints.load(path))
        return start

    def _choose(self, trainer: Trainer) -> _Start:
        resume = self._settings.train.resume
        if resume == "never":
            try:
                aside = self._folder.set_aside()
            except OSError as error:
                raise CheckpointError(f"{self._folder.path} cannot be renamed: {error.strerror}") from None
            if aside is not None:
                self._console.say(f"earlier checkpoints are now in {aside}")
            return _Start()
        if resume == "auto":
            for reason in self._folder.invalid():
                self._console.say(f"warning: {reason}; looking for an earlier one")
            found = self._folder.newest()
            if found is None:
                return _Start()
            path, manifest = found
        else:
            path = Path(resume)
            manifest = read_manifest(path)
        require_same_model(path, model_fields(manifest.config), model_fields(trainer.config.to_dict()))
        changes = changes_on_resume(path, manifest, self._settings)
        self._console.say(f"resuming after step {manifest.step} from {path}, written by {manifest.layout}")
        for line in changes:
            self._console.say(f"warning: {line}")
        return _Start(manifest.step, manifest.position, path)

    def _open_corpus(self) -> Corpus:
        """The corpus, with a progress bar while it is read, and what there is to say of it."""
        with self._console.progress() as progress:

            def report(reached: Progress) -> None:
                self._announce(str(reached))
                progress(reached)

            self._announce("opening the corpus")
            corpus = open_corpus(self._settings.data, self._settings.tokenizer, report)
        for line in corpus.report:
            self._console.say(line)
        self._console.say(
            f"{len(corpus.train)} sequences to train on, {len(corpus.held_out)} held out; "
            f"unigram entropy {corpus.unigram_entropy:.4f} nats per token"
        )
        return corpus


def _nothing_to_do(step: int, settings: TrainSettings) -> str:
    """Why a run that starts after ``step`` steps has none to do, and what would give it some."""
    anew = "or set train.resume to never to start anew"
    if step == settings.steps:
        return f"all {step} steps are done; raise train.steps, {anew}"
    if step > settings.steps:
        return f"the run is at step {step}, beyond train.steps, which is {settings.steps}; raise it, {anew}"
    return (
        f"the run is at step {step} of {settings.steps}, and train.stop_after, counted from the first step of all, is "
        f"{settings.stop_after}: there is nothing to do; raise it or leave it out, {anew}"
    )
