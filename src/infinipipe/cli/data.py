"""``infinipipe data stats CONFIG``: how long the sequences of a corpus are, and what steps are made of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from infinipipe.cli.options import require_output
from infinipipe.cli.train import read_settings
from infinipipe.data.lengths import LengthBucket, length_buckets, policy_outcomes
from infinipipe.files import write_beside
from infinipipe.settings import SettingError, require_range
from infinipipe.timeline.figure import Box, Figure, Label, Shape
from infinipipe.timeline.png import to_png
from infinipipe.timeline.svg import to_svg
from infinipipe.timeline.themes import THEMES

if TYPE_CHECKING:
    from infinipipe.data import Corpus
    from infinipipe.train.settings import Settings

BAR = 16
WIDTH, HEIGHT, MARGIN, HEADING, GAP = 900.0, 340.0, 24.0, 44.0, 6.0
QUANTILES = (0.5, 0.9, 0.99)


def run(arguments: Sequence[str]) -> int:
    """Tokenize the corpus if that has not been done, and print what there is in it."""
    parser = argparse.ArgumentParser(
        prog="infinipipe data",
        usage="infinipipe data stats CONFIG [--section.setting VALUE ...] [--output FILE] [--steps N]",
        description="How long the sequences are that CONFIG, a configuration of 'infinipipe train', makes of its corpus; what other "
        "values of data.on_too_long would make of it; and the plan of a step. Settings can be overridden as there.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("what", choices=["stats"], nargs="?", help="what to do")
    parser.add_argument("--output", help="a picture of the lengths, .svg or .png")
    parser.add_argument(
        "--steps", type=int, default=20, help="how many steps to draw; the one of most tokens is planned"
    )
    try:
        given, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise SettingError(f"{error}; see 'infinipipe data --help'") from None
    if given.what is None:
        raise SettingError("say what to do with the data: infinipipe data stats CONFIG; see 'infinipipe data --help'")
    require_range("steps", given.steps, at_least=1)
    if given.output is not None and Path(given.output).suffix.lower() not in (".svg", ".png"):
        raise SettingError(f"output is {given.output!r}; it must end in .svg or .png")
    require_output(given.output)
    if not rest or rest[0].startswith("-"):
        raise SettingError(
            "name a configuration file first: infinipipe data stats CONFIG [--section.setting VALUE ...]"
        )
    settings, _ = read_settings(rest)
    describe(settings, given.steps, given.output)
    return 0


def describe(settings: Settings, steps: int, output: str | None) -> None:
    """Print the statistics of a corpus, and draw them to ``output`` if that is given."""
    from infinipipe.data import open_corpus
    from infinipipe.train.console import Console as Lines

    with Lines(quiet=False).progress() as progress:
        corpus = open_corpus(settings.data, settings.tokenizer, progress)
    console = Console(highlight=False, soft_wrap=True)
    for line in corpus.report:
        console.print(line, markup=False)
    lengths = np.concatenate([corpus.train.lengths, corpus.held_out.lengths])
    console.print(
        f"{len(corpus.train):,} sequences to train on, {len(corpus.held_out):,} held out; {int(lengths.sum()):,} tokens"
    )
    buckets = length_buckets(lengths)
    print_lengths(console, lengths, buckets)
    print_policies(console, corpus, settings)
    if output is not None:
        picture = draw(buckets, settings.data.max_length)
        write_beside(output, to_svg(picture).encode() if output.lower().endswith(".svg") else to_png(picture))
        console.print(f"wrote {output}", markup=False)
    print_step(console, corpus, settings, steps)


def print_lengths(console: Console, lengths: NDArray[np.int64], buckets: Sequence[LengthBucket]) -> None:
    """A histogram of the tokens by the length of their sequence."""
    total = int(lengths.sum())
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("length", "sequences", "of all", "tokens", "of all"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("share of tokens", no_wrap=True)
    for bucket in buckets:
        share = bucket.tokens / total
        table.add_row(
            f"{bucket.most // 2 + 1:,} to {bucket.most:,}",
            f"{bucket.sequences:,}",
            f"{bucket.sequences / len(lengths):.1%}",
            f"{bucket.tokens:,}",
            f"{share:.1%}",
            Bar(1.0, 0.0, share, width=BAR),
        )
    console.print(table)
    quantiles = ", ".join(
        f"{share:.0%} up to {int(length):,}"
        for share, length in zip(QUANTILES, np.quantile(lengths, QUANTILES, method="inverted_cdf"), strict=True)
    )
    console.print(f"sequences by tokens: {quantiles}, the longest {int(lengths.max()):,}")


def print_policies(console: Console, corpus: Corpus, settings: Settings) -> None:
    """What every policy for documents that are too long would make of the corpus."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("data.on_too_long", "sequences", "tokens", "documents lost"):
        table.add_column(name, justify="left" if name.startswith("data") else "right", no_wrap=True)
    for outcome in policy_outcomes(corpus.train.caches, settings.data):
        own = " (chosen)" if outcome.policy == settings.data.on_too_long else ""
        table.add_row(
            f"{outcome.policy}{own}", f"{outcome.sequences:,}", f"{outcome.tokens:,}", f"{outcome.documents:,}"
        )
    console.print(f"with data.max_length {settings.data.max_length:,}:")
    console.print(table)
    cut = sum(cache.counts.cut for cache in corpus.train.caches)
    if cut:
        console.print(
            f"{cut} documents are so long that only their beginning was tokenized; set data.on_too_long to split to count all of them"
        )


def print_step(console: Console, corpus: Corpus, settings: Settings, steps: int) -> None:
    """The plan of the step with the most tokens of the first ``steps``."""
    from infinipipe.cli.plan import summarise
    from infinipipe.cost import typical_length
    from infinipipe.train.model import Vocabulary, model_config
    from infinipipe.train.planning import StepPlanner

    vocabulary = Vocabulary.of(corpus.tokenizer)
    config = model_config(settings.model, vocabulary.size, vocabulary.special)
    planner = StepPlanner(settings, config, typical_length(corpus.train.lengths))
    batches = corpus.batches(settings.data, settings.train.seed)
    try:
        drawn = [[sample.length for sample in batches.next()] for _ in range(steps)]
    finally:
        batches.close()
    tokens = [sum(lengths) for lengths in drawn]
    largest = int(np.argmax(tokens))
    console.print(
        f"{steps} steps drawn: {min(tokens):,} to {max(tokens):,} tokens each, {sum(tokens) / steps:,.0f} in the mean; "
        f"of most tokens is step {largest + 1}:"
    )
    summarise(console, planner.plan(drawn[largest]), planner.cost, planner.settings)


def draw(buckets: Sequence[LengthBucket], max_length: int) -> Figure:
    """Bars of the share of sequences and of tokens in every bucket."""
    theme = THEMES["light"]
    sequences, tokens = (sum(getattr(bucket, name) for bucket in buckets) for name in ("sequences", "tokens"))
    base, step = HEIGHT - 2 * MARGIN, (WIDTH - 2 * MARGIN) / len(buckets)
    highest = max(max(bucket.sequences / sequences, bucket.tokens / tokens) for bucket in buckets)
    kinds = (("sequences", sequences, theme["packed"]), ("tokens", tokens, theme["memory"]))
    shapes: list[Shape] = [
        Label(MARGIN, MARGIN, "share of sequences", theme["packed"], bold=True),
        Label(MARGIN + 150, MARGIN, "share of tokens", theme["memory"], bold=True),
        Label(WIDTH - MARGIN, MARGIN, f"{sequences:,} sequences, {tokens:,} tokens", theme["muted"], anchor="end"),
        Box(MARGIN, base, WIDTH - 2 * MARGIN, 1, theme["line"]),
        Label(
            WIDTH / 2,
            HEIGHT - 12,
            f"tokens of a sequence, up to (data.max_length is {max_length:,})",
            theme["muted"],
            anchor="middle",
        ),
    ]
    for index, bucket in enumerate(buckets):
        left, width = MARGIN + index * step + GAP, (step - 2 * GAP) / 2
        for place, (name, total, color) in enumerate(kinds):
            share = getattr(bucket, name) / total
            if not share:
                continue
            height = 1 + share / highest * (base - HEADING - 16)
            x = left + place * width
            shapes.append(Box(x, base - height, width, height, color, title=f"{share:.1%} of the {name}"))
            if share >= 0.005:
                shapes.append(Label(x + width / 2, base - height - 8, f"{share:.0%}", color, 10, anchor="middle"))
        shapes.append(Label(left + width, base + 12, f"{bucket.most:,}", theme["text"], 10, anchor="middle"))
    return Figure(WIDTH, HEIGHT, theme["panel"], tuple(shapes))
