"""What can be known wrong is refused before anything is read, and what a step may meet is planned before the first one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from infinipipe.data import Corpus, load_tokenizer
from infinipipe.data.settings import DataSettings
from infinipipe.plan import PlanError
from infinipipe.planner import BudgetError, plan_step
from infinipipe.timeline.units import readable_bytes
from infinipipe.train.model import StartModel, Vocabulary, open_model
from infinipipe.train.planning import StepPlanner
from infinipipe.train.settings import Settings
from infinipipe.verify import self_check

WORST_TRIES, WORST_SECONDS = 3, 10.0
"""Plans of a worst batch that are tried, and the seconds that it may take."""


def check_start(settings: Settings) -> StartModel:
    """The model that the settings describe, as far as it is known before the corpus is.

    The model can be built and cut as asked, its weights are there, its family is computed exactly, the cost file is of it, the
    tokenizer's ids have rows in its embedding. Raises ``ValueError`` for whatever is not so.
    """
    vocabulary = None
    if not settings.model.path:
        tokenizer = settings.tokenizer
        if tokenizer.path:
            vocabulary = Vocabulary.of(load_tokenizer(tokenizer.path, tokenizer.chat_template))
        else:
            vocabulary = Vocabulary(tokenizer.vocab_size)
    model = open_model(settings, vocabulary)
    StepPlanner(settings, model.config, settings.data.max_length)
    self_check(model.config)
    return model


def check_worst(planner: StepPlanner, corpus: Corpus, data: DataSettings) -> str:
    """Plan the longest sequence alone and the most that a step can draw; says how tight the latter is.

    Of a stream the longest sequence is one of ``data.max_length`` tokens. Raises ``PlanError`` if they cannot be trained.
    """
    lengths = np.sort(corpus.train.lengths)[::-1].tolist()
    if corpus.stream is not None:
        lengths = [data.max_length, *lengths]
    settings = dataclasses.replace(planner.settings, work_limit=WORST_TRIES, time_limit=WORST_SECONDS)
    peaks: list[list[int]] | None = None
    batch = worst_batch(lengths, data)
    for chosen in (lengths[:1], batch):
        what = f"a sequence of {chosen[0]:,} tokens" if len(chosen) == 1 else described(chosen)
        try:
            peaks = plan_step(chosen, planner.cost, settings).metadata["predicted_peak_bytes"]
        except BudgetError as error:
            raise PlanError(f"{what} does not fit plan.memory_budget: {error}") from None
        except PlanError as error:
            raise PlanError(f"{what} cannot be planned: {error}") from None
    if peaks is None or planner.settings.memory_budget is None:
        return f"the most that a step can draw: {described(batch)}; plan.memory_budget is not set, so that memory is not checked"
    worst = max(max(stages) for stages in peaks)
    budget = planner.settings.memory_budget
    return (
        f"the most that a step can draw: {described(batch)}; it needs {readable_bytes(worst, round_up=True)} of the "
        f"{readable_bytes(budget)} of plan.memory_budget"
    )


def worst_batch(lengths: Sequence[int], data: DataSettings) -> list[int]:
    """The longest sequences, of descending ``lengths``, that one step can draw."""
    chosen = list(lengths[: data.sequences_per_step])
    while data.tokens_per_step and len(chosen) > 1 and sum(chosen) > data.tokens_per_step:
        chosen.pop()
    return chosen


def described(lengths: Sequence[int]) -> str:
    """A batch in words."""
    count = "the longest sequence" if len(lengths) == 1 else f"the {len(lengths)} longest sequences"
    return f"{count}, {sum(lengths):,} tokens"
