"""What rank 0 alone has in a run, and does for all processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infinipipe.data import Corpus
from infinipipe.runtime import Batch
from infinipipe.train.assets import Provenance, keep_assets
from infinipipe.train.console import Console
from infinipipe.train.heartbeat import Announce
from infinipipe.train.loader import DataLoader, TrainingBatch, make_batch, require_supervised
from infinipipe.train.metrics import Evaluation, Pace, StepRecord
from infinipipe.train.model import StartModel
from infinipipe.train.planning import StepPlanner
from infinipipe.train.settings import Settings
from infinipipe.train.trackers import MetricsWriter

NAMED_AT_MOST = 8
"""Documents that a message lists."""


class Leader:
    """Rank 0's corpus, data loader and metrics. What exports need is kept in the run's folder from the start.

    Args:
        model: what the run started from.
        text: the settings as YAML, to be kept.
        step: steps that are done already.
        position: of the data after them, if there are any.
        console: where it says how training gets on.
        announce: told what this process does.

    Raises ``DataError`` if ``position`` is of other data.
    """

    def __init__(
        self,
        corpus: Corpus,
        model: StartModel,
        settings: Settings,
        planner: StepPlanner,
        *,
        text: str,
        step: int,
        position: dict[str, Any] | None,
        console: Console,
        announce: Announce,
    ) -> None:
        self._corpus = corpus
        self._last_step = settings.train.last_step
        self._pace = Pace(self._last_step)
        self._console, self._announce = console, announce
        output = Path(settings.train.output)
        output.mkdir(parents=True, exist_ok=True)
        (output / "settings.yaml").write_text(text)
        keep_assets(output, corpus.tokenizer, settings.model.path)
        _provenance(corpus, model, settings).save(output)
        with ExitStack() as stack:
            self._metrics = stack.enter_context(
                MetricsWriter(
                    output,
                    after_step=step,
                    trackers=settings.train.trackers,
                    project=settings.train.project,
                    config=asdict(settings),
                    say=console.say,
                )
            )
            self._loader = stack.enter_context(
                DataLoader(corpus, settings, planner, position, rows=model.config.vocab_size)
            )
            self._opened = stack.pop_all()
        for line in self._loader.remarks:
            console.say(f"warning: {line}")

    def next_batch(self, step: int) -> TrainingBatch:
        """The batch of a step. Raises ``PlanError`` and what else refuses a batch."""
        self._announce(f"planning step {step}")
        return self._loader.next()

    def num_held_out(self) -> int:
        """Sequences that are held out."""
        return len(self._corpus.held_out)

    def held_out_batch(self, chosen: list[int]) -> Batch:
        """The held-out sequences of those indices. Raises ``ValueError`` if nothing can be learnt from them."""
        batch = make_batch([self._corpus.held_out.sample(index) for index in chosen])
        require_supervised(batch)
        return batch

    def documents(self, chosen: Sequence[int]) -> str:
        """Where those sequences of the last batch come from, or all of it if none are chosen, in words."""
        samples = [self._loader.samples[index] for index in chosen] or self._loader.samples
        names = [sample.name for sample in samples[:NAMED_AT_MOST]]
        more = f" and {len(samples) - len(names)} more" if len(samples) > len(names) else ""
        return ", ".join(names) + more

    def record_step(self, record: StepRecord) -> None:
        """Say and write what is known of a step."""
        self._console.say(record.line(self._last_step, self._pace.left(record, time.monotonic())))
        self._metrics.step(record)

    def record_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Say and write the held-out loss after ``step`` steps; after the last also against the entropy of single tokens."""
        loss, entropy = evaluation.loss, self._corpus.unigram_entropy
        self._console.say(f"held-out loss {loss:.4f} over {evaluation.tokens} tokens")
        self._metrics.evaluation(step, evaluation)
        if step == self._last_step:
            self._console.say(
                f"held-out loss {loss:.4f}, unigram entropy {entropy:.4f}: "
                f"{abs(entropy - loss):.4f} nats per token {'better' if entropy >= loss else 'worse'}"
            )

    def close(self) -> None:
        """Close files, end the planning process."""
        self._opened.close()


def _provenance(corpus: Corpus, model: StartModel, settings: Settings) -> Provenance:
    return Provenance(
        source=Path(settings.model.path).resolve().name if settings.model.weights == "load" else "",
        dtype=str(model.export_dtype).removeprefix("torch."),
        longest=settings.data.max_length if corpus.stream is not None else int(corpus.train.lengths.max()),
        corpus=[*corpus.report, f"{len(corpus.train)} sequences to train on, {len(corpus.held_out)} held out"],
    )
