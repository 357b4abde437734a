"""The training loop: from settings to a trained model, through interruptions."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinipipe.cost import typical_length
from infinipipe.data import Corpus, open_corpus
from infinipipe.train.checkpoint import Checkpoints
from infinipipe.train.console import Console
from infinipipe.train.convert import TOKENIZER
from infinipipe.train.export import save_model
from infinipipe.train.feed import Feed
from infinipipe.train.interrupt import STOPPED, StopRequest
from infinipipe.train.job import Job
from infinipipe.train.lock import OutputLock
from infinipipe.train.metrics import MetricsWriter
from infinipipe.train.model import model_config
from infinipipe.train.place import Place
from infinipipe.train.progress import WAITING, Progress, Watchdog
from infinipipe.train.report import REPORTS
from infinipipe.train.settings import Settings
from infinipipe.train.store import CheckpointError, CheckpointFolder, Manifest, read_manifest
from infinipipe.train.trainer import Trainer
from infinipipe.verify import self_check


def train(settings: Settings, place: Place, *, settings_text: str) -> int:
    """Train as ``settings`` say; every process of the job calls this. ``settings_text`` is kept beside the results.

    Returns the exit code: 0, or ``STOPPED`` if a signal ended the run early. Raises ``ValueError`` for what the user can mend.
    """
    output = Path(settings.train.output)
    lock = OutputLock(output) if place.rank == 0 and REPORTS not in os.environ else None
    progress = Progress(output / "logs", place.rank)
    name = settings.parallel.name_of
    watchdog = Watchdog(progress, place.world_size, settings.train.timeout, name)
    job = Job.start(place, settings.parallel)
    with StopRequest() as stop:
        code = Run(job, settings, settings_text, progress, stop).execute()
    progress.doing(f"{WAITING} for the end of the job")
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
        stop: asks the run to end early.
    """

    def __init__(
        self,
        job: Job,
        settings: Settings,
        settings_text: str = "",
        progress: Progress | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self._job, self._settings = job, settings
        self._text = settings_text
        self._progress = progress
        self._stop = stop or StopRequest()
        self._console = Console(quiet=not job.is_first)
        self._output = Path(settings.train.output)
        self._folder = CheckpointFolder(self._output / "checkpoints", settings.train.keep_checkpoints)

    def execute(self) -> int:
        """Train, from a checkpoint if there is one to resume from, and export the model; returns the exit code."""
        job, settings = self._job, self._settings
        corpus = self._open_corpus()
        vocab_size = job.on_first(lambda: len(_of_first(corpus).tokenizer))
        length = job.on_first(lambda: typical_length(_of_first(corpus).train.lengths))
        config = job.everywhere(lambda: model_config(settings.model, vocab_size))
        job.on_first(lambda: self_check(config))
        trainer = Trainer(job, settings, config, length, self._progress)
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
        start = self._resume(trainer, checkpoints)
        with ExitStack() as stack:
            feed = metrics = None
            if corpus is not None:
                self._output.mkdir(parents=True, exist_ok=True)
                (self._output / "settings.yaml").write_text(self._text)
                corpus.tokenizer.save_pretrained(self._output / TOKENIZER)
                metrics = stack.enter_context(MetricsWriter(self._output, after_step=start.step))
                feed = stack.enter_context(Feed(corpus.train, settings, trainer.planner, start.position))
            stopped = self._steps(trainer, checkpoints, start, corpus, feed, metrics)
        if stopped:
            return STOPPED
        trainer.doing("writing the model")
        tokenizer = None if corpus is None else corpus.tokenizer
        save_model(self._output / "checkpoint", job, trainer.mesh, trainer.stage, trainer.parameters, config, tokenizer)
        self._console.say(f"wrote {self._output / 'checkpoint'}")
        return 0

    def _steps(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        start: _Start,
        corpus: Corpus | None,
        feed: Feed | None,
        metrics: MetricsWriter | None,
    ) -> bool:
        """All steps with evaluations and checkpoints; whether a signal ended them early."""
        settings, say = self._settings.train, self._console.say
        last, every = settings.stop_after or settings.steps, settings.checkpoint_every
        if start.step >= last:
            say(f"all {last} steps are done; raise train.steps, or set train.resume to never to start anew")
        for number in range(start.step + 1, last + 1):
            record, planned = trainer.step(number, feed)
            say(record.line(last))
            if metrics is not None:
                metrics.step(record)
            if number == last or (settings.evaluate_every and number % settings.evaluate_every == 0):
                self._evaluate(trainer, number, corpus, metrics, is_last=number == last)
            stopped = any(self._job.gather_objects(self._stop.asked)) and number < last
            if stopped or (every and (number == last or number % every == 0)):
                manifest = None
                if planned is not None:
                    manifest = self._manifest(number, planned.drawn.position, trainer)
                self._save(checkpoints, trainer, manifest, must=stopped or number == last)
            elif (failure := checkpoints.poll()) is not None:
                say(f"warning: {failure}; training goes on")
            if stopped:
                say(f"stopped after step {number} as asked; start again to go on from there")
                return True
        return False

    def _save(self, checkpoints: Checkpoints, trainer: Trainer, manifest: Manifest | None, *, must: bool) -> None:
        """Save; where nothing ``must`` be safe afterwards, a failure is a warning, else it is raised."""
        trainer.doing("saving a checkpoint")
        failure = checkpoints.save(manifest)
        if must:
            later = checkpoints.finish()
            failure = later or failure

            def require() -> None:
                if failure is not None:
                    raise CheckpointError(f"{failure}; make room or name another train.output, and start again")

            self._job.on_first(require)
        elif failure is not None:
            self._console.say(f"warning: {failure}; training goes on")

    def _manifest(self, step: int, position: dict[str, Any], trainer: Trainer) -> Manifest:
        layout = self._settings.parallel.layout
        return Manifest(step, position, trainer.config.to_dict(), layout, self._text, files={})

    def _resume(self, trainer: Trainer, checkpoints: Checkpoints) -> _Start:
        """Load the checkpoint to go on from, if any. Raises ``CheckpointError`` for one that cannot be used."""
        start = self._job.on_first(lambda: self._choose(trainer))
        if start.checkpoint is not None:
            path = start.checkpoint
            trainer.doing(f"reading the checkpoint {path}")
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
        _check_model(path, manifest, trainer.config.to_dict())
        self._console.say(f"resuming after step {manifest.step} from {path}, written by {manifest.layout}")
        return _Start(manifest.step, manifest.position, path)

    def _evaluate(
        self, trainer: Trainer, number: int, corpus: Corpus | None, metrics: MetricsWriter | None, *, is_last: bool
    ) -> None:
        evaluation = trainer.evaluate(None if corpus is None else corpus.held_out)
        if evaluation is None:
            return
        self._console.say(f"held-out loss {evaluation.loss:.4f} over {evaluation.tokens} tokens")
        if metrics is not None:
            metrics.evaluation(number, evaluation.loss, evaluation.tokens)
        if is_last and corpus is not None:
            gain = corpus.unigram_entropy - evaluation.loss
            self._console.say(
                f"held-out loss {evaluation.loss:.4f}, unigram entropy {corpus.unigram_entropy:.4f}: "
                f"{abs(gain):.4f} nats per token {'better' if gain >= 0 else 'worse'}"
            )

    def _open_corpus(self) -> Corpus | None:
        """The corpus on rank 0; the others wait until it is there."""
        corpus: Corpus | None = None
        console, settings = self._console, self._settings

        def opened() -> None:
            nonlocal corpus
            with console.progress() as progress:

                def report(what: str, done: int, total: int) -> None:
                    self._doing(f"{what}: {done} of {total} bytes")
                    progress(what, done, total)

                corpus = open_corpus(settings.data, settings.tokenizer, report)

        self._doing(f"{WAITING} for the corpus" if not self._job.is_first else "opening the corpus")
        self._job.on_first(opened)
        if corpus is not None:
            for line in corpus.report:
                console.say(line)
            console.say(
                f"{len(corpus.train)} sequences to train on, {len(corpus.held_out)} held out; "
                f"unigram entropy {corpus.unigram_entropy:.4f} nats per token"
            )
        return corpus

    def _doing(self, action: str) -> None:
        if self._progress is not None:
            self._progress.doing(action)


def _of_first(corpus: Corpus | None) -> Corpus:
    assert corpus is not None, "only rank 0 asks for the corpus"
    return corpus


def _check_model(path: Path, manifest: Manifest, config: dict[str, Any]) -> None:
    """Raise ``CheckpointError`` if a checkpoint is of another model."""
    ignored = {"transformers_version", "dtype", "torch_dtype", "architectures", "_name_or_path"}
    for name in sorted((config.keys() | manifest.config.keys()) - ignored):
        ours, theirs = _plain(config.get(name)), manifest.config.get(name)
        if ours != theirs:
            raise CheckpointError(
                f"the checkpoint {path} is of another model: its {name} is {theirs}, not {ours}; name another train.output, "
                "or set train.resume to never"
            )


def _plain(value: Any) -> Any:
    """The value as it comes back from JSON."""
    return json.loads(json.dumps(value))
