"""Training on chats and weighted records, in stages and slices, has the losses of the plain model on the same spans and weights."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infinipipe.cli.train import read_settings
from infinipipe.data import open_corpus
from infinipipe.train.reference import plain_losses
from infinipipe.train.settings import Settings
from tests.data.chat_templates import CHATML, chat_tokenizer
from tests.data.conftest import words

from .pooled import Workers, change, losses, run

STEPS = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def settings(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("chats")
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.save_pretrained(folder / "tokenizer")
    rng, records = random.Random(0), []
    for index in range(12):
        turns = [
            {"role": role, "content": words(rng.randint(1, 30), rng.randint(0, 99))}
            for _ in range(rng.randint(1, 4))
            for role in ("user", "assistant")
        ]
        records.append({"messages": turns, "w": rng.choice([0.25, 1, 3])})
        records.append({"prompt": words(9, index), "completion": words(index + 1, index), "w": rng.choice([0.5, 2])})
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_settings(
        [
            str(config),
            "--data.files",
            json.dumps([str(folder / "chats.jsonl")]),
            f"--tokenizer.path={folder / 'tokenizer'}",
            f"--model.config.vocab_size={len(tokenizer)}",
            "--data.sequences_per_step=7",
            "--data.weight_field=w",
        ]
    )[0]


@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 2, 2)])
def test_losses_are_the_plain_models(
    pool: Workers, settings: Settings, layout: tuple[int, int, int], tmp_path: Path
) -> None:
    records = run(pool, change(settings, layout, tmp_path, steps=STEPS))
    chosen = replace(settings, train=replace(settings.train, steps=STEPS))
    assert losses(records) == pytest.approx(plain_losses(chosen, STEPS), abs=1e-4)


def test_weights_and_spans_matter(settings: Settings) -> None:
    """What the plain model would have without them is far from it."""
    expected = plain_losses(settings, 2)
    for data in (replace(settings.data, weight_field=""), replace(settings.data, loss_on="all")):
        other = plain_losses(replace(settings, data=data), 2)
        assert abs(other[0] - expected[0]) > 1e-3
    assert any(weight != 1 for weight in open_corpus(settings.data, settings.tokenizer).train.caches[0].weights)
