"""Training on several sources and on streams: the losses of the plain model, exact resuming, and what is said of sources."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from infinipipe.cli.train import read_settings
from infinipipe.data import SourceSettings
from infinipipe.train.job import Job
from infinipipe.train.loop import Run
from infinipipe.train.reference import plain_losses
from infinipipe.train.settings import Settings

from .pooled import change, losses, read_records

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """This process alone, which may have children that tokenize."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield Job.among(range(1), torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mixed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """The small corpus, and chats of which the answers are learnt, in equal shares."""
    folder = tmp_path_factory.mktemp("mixed")
    settings = read_settings([str(config)])[0]
    (folder / "chat.jinja").write_text(TEMPLATE)
    chats = [
        [{"role": "user", "content": f"number {n}"}, {"role": "assistant", "content": f"it is {n * n} " * (n % 7 + 1)}]
        for n in range(60)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    sources = {
        "texts": SourceSettings(files=settings.data.files, weight=1),
        "chats": SourceSettings(files=[str(folder / "chats.jsonl")], weight=1),
    }
    data = replace(settings.data, files=[], sources=sources, cache=str(folder / "cache"), shuffle_window=16, workers=1)
    tokenizer = replace(settings.tokenizer, chat_template=str(folder / "chat.jinja"))
    return replace(settings, data=data, tokenizer=tokenizer, plan=replace(settings.plan, num_slices=2))


@pytest.mark.parametrize("streaming", [False, True], ids=["cached", "streamed"])
def test_runs_on_several_sources_are_the_plain_models_and_resume_exactly(
    job: Job, mixed: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str], streaming: bool
) -> None:
    mixed = replace(mixed, data=replace(mixed.data, streaming=streaming))

    def run(name: str, **changes: int) -> Settings:
        settings = change(mixed, (1, 1, 1), tmp_path / name, steps=4, checkpoint_every=2, **changes)
        assert Run(job, settings, "text: kept").execute() == 0
        return settings

    straight = read_records(run("straight"))
    assert losses(straight) == pytest.approx(plain_losses(mixed, 4), abs=1e-4)
    run("resumed", stop_after=2)
    resumed = read_records(run("resumed"))
    for key in ("loss", "gradient_norm", "plan_hash", "tokens", "sources"):
        assert [record[key] for record in resumed] == [record[key] for record in straight]
    assert all(sum(record["sources"].values()) == record["tokens"] for record in straight)
    totals = {name: sum(record["sources"].get(name, 0) for record in straight) for name in ("texts", "chats")}
    assert min(totals.values()) > 0.2 * sum(totals.values())
    shown = capsys.readouterr().out
    first = straight[0]
    assert f"{first['tokens']} tokens ({', '.join(f'{n} {t}' for n, t in first['sources'].items())}): " in shown
    assert ("streaming: the figures are those of the first" in shown) == streaming
    assert "texts: " in shown
    assert "chats: " in shown


def test_a_changed_corpus_is_said_and_another_is_refused(
    job: Job, mixed: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = change(mixed, (1, 1, 1), tmp_path, steps=4, checkpoint_every=2, stop_after=2)
    Run(job, settings, "text: kept").execute()
    assert "warning: " not in capsys.readouterr().out
    first = replace(mixed.data, exclude=["*chats.jsonl:1"])
    further = change(replace(mixed, data=first), (1, 1, 1), tmp_path, steps=4)
    Run(job, further, "text: kept").execute()
    assert "warning: the corpus has changed since: " in capsys.readouterr().out
    other = change(mixed, (1, 1, 1), tmp_path, steps=4, seed=9, resume=str(tmp_path / "checkpoints" / "step-00000002"))
    with pytest.raises(ValueError, match="the saved position belongs to another corpus, seed or batch size"):
        Run(job, other, "text: kept").execute()


def test_tokens_of_sources_are_scalars(tmp_path: Path, mixed: Settings, job: Job) -> None:
    settings = change(mixed, (1, 1, 1), tmp_path, steps=1)
    Run(job, settings, "text: kept").execute()
    (events,) = (tmp_path / "tensorboard").glob("events*")
    assert b"train/tokens/chats" in events.read_bytes()
