"""Training end to end on two processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infinipipe.cli.train import read_settings
from infinipipe.data import open_corpus
from infinipipe.train.loader import make_batch
from infinipipe.train.reference import plain_losses
from infinipipe.verify.reference import reference_step

from .conftest import COMMAND, Finished, train

DOCUMENT = Path(__file__).parents[2] / "docs" / "training.md"


def test_run_ends_well_and_says_what_it_did(finished: Finished) -> None:
    assert (finished.code, finished.err) == (0, "")
    assert "step 6/6  loss " in finished.out
    assert "hybrid chunks" in finished.out
    assert "activations " in finished.out
    assert "unigram entropy" in finished.out.splitlines()[-2]
    assert [record["step"] for record in finished.metrics("step")] == list(range(1, 7))
    assert [record["step"] for record in finished.metrics("evaluation")] == [4, 6]
    assert list((finished.output / "tensorboard").glob("events*"))


def test_plans_cut_and_pack(finished: Finished) -> None:
    plans = [record["plan"] for record in finished.metrics("step")]
    assert max(plan["most_slices"] for plan in plans) >= 4
    assert sum(plan["hybrid"] for plan in plans) > 0


def test_peaks_of_both_stages_are_reported(finished: Finished) -> None:
    for record in finished.metrics("step"):
        assert len(record["peak_bytes"]) == 2
        assert min(record["peak_bytes"]) > 0


def test_losses_are_the_plain_models(finished: Finished) -> None:
    settings, _ = read_settings(finished.arguments)
    expected = plain_losses(settings, 6)
    losses = [record["loss"] for record in finished.metrics("step")]
    assert losses == pytest.approx(expected, abs=1e-4)
    assert losses[-1] < losses[0] - 0.3


def test_checkpoint_loads_with_the_loss_it_had(finished: Finished) -> None:
    folder = finished.output / "checkpoint"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    settings, _ = read_settings(finished.arguments)
    corpus = open_corpus(settings.data, settings.tokenizer)
    text = "alpha beta <gamma>"
    assert AutoTokenizer.from_pretrained(folder)(text) == corpus.tokenizer(text)
    count = min(len(corpus.held_out), settings.train.evaluate_sequences)
    loss, _ = reference_step(model, make_batch([corpus.held_out.sample(index) for index in range(count)]))
    assert loss == pytest.approx(finished.metrics("evaluation")[-1]["loss"], abs=1e-4)


def test_kept_settings_are_those_of_the_run(finished: Finished) -> None:
    kept, _ = read_settings([str(finished.output / "settings.yaml")])
    assert kept == read_settings(finished.arguments)[0]


def test_users_error_inside_workers_is_one_sentence(config: Path) -> None:
    run = train(config, "--data.files", '["none/*.txt"]', output="refused")
    assert run.code == 2
    (line,) = run.err.splitlines()
    assert line.startswith("infinipipe: error: data.files names 'none/*.txt', but no file matches")
    assert not (run.output / "checkpoint").exists()


class Running:
    """A run that goes on until something happens to it."""

    def __init__(self, config: Path, output: Path, *overrides: str) -> None:
        self.metrics = output / "metrics.jsonl"
        command = [*COMMAND, str(config), "--train.output", str(output), "--train.steps", "100000", *overrides]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while not (self.metrics.exists() and f'"step": {step}, ' in self.metrics.read_text()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def end(self) -> tuple[int, str, list[str]]:
        """Exit code, output and lines of errors."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err.splitlines()


def test_a_run_through_interruptions(config: Path) -> None:
    output = config.parent / "interrupted"
    running = Running(config, output)
    running.wait_for_step(2)
    second = train(config, output="interrupted")
    assert second.code == 2
    assert "interrupted' is in use by process" in second.err
    running.process.send_signal(signal.SIGTERM)
    code, out, errors = running.end()
    assert (code, errors) == (3, [])
    stopped = int(out.split("stopped after step ")[1].split()[0])

    running = Running(config, output, "--train.timeout", "8")
    running.wait_for_step(stopped + 2)
    workers = _children(running.process.pid)
    os.kill(workers[1], signal.SIGSTOP)
    code, out, (error,) = running.end()
    assert f"resuming after step {stopped} from" in out
    assert code == 1
    assert "rank 1 (stage 1) does not answer and holds up all processes for 8 s (train.timeout)" in error
    assert "its last action: " in error
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def _children(parent: int) -> list[int]:
    """Process ids of the children of ``parent``, in the order of their ranks."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                environment = stat.with_name("environ").read_bytes().split(b"\0")
                rank = next(item for item in environment if item.startswith(b"RANK="))
                found[int(rank[5:])] = int(stat.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [found[rank] for rank in sorted(found)]


def test_documented_commands_train_and_resume_in_another_layout(config: Path) -> None:
    output = config.parent / "documented"
    alone, _, joined = commands(DOCUMENT)
    assert alone[:3] == ["infinipipe", "train", "config.yaml"]
    begun = train(config, *alone[3:], "--train.stop_after", "1", output=output.name)
    assert (begun.code, begun.err) == (0, "")
    assert (joined[0], joined[-1]) == ("torchrun", "config.yaml")
    command = [sys.executable, "-m", "torch.distributed.run", *joined[1:-1], str(config)]
    command += ["--train.output", str(output), "--train.stop_after", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "resuming after step 1 from" in done.stdout
    assert "written by 2 replicas x 2 stages" in done.stdout
    assert "step 2/2" in done.stdout
    assert (output / "checkpoint" / "config.json").is_file()
    assert (output / "metrics.jsonl").read_text().count('"kind": "step"') == 2


def test_the_documented_command_trains_with_several_parts_on_each_stage(config: Path) -> None:
    _, placed, _ = commands(DOCUMENT)
    assert placed[:3] == ["infinipipe", "train", "config.yaml"]
    four_layers = ("--model.config.num_hidden_layers", "4")
    done = train(config, *placed[3:], *four_layers, "--train.stop_after", "1", output="placed")
    assert (done.code, done.err) == (0, "")
    assert "step 1/1" in done.out


def commands(document: Path) -> list[list[str]]:
    """The commands in the shell blocks of a document that train by ``config.yaml``."""
    blocks = document.read_text().split("```sh\n")[1:]
    lines = [line.split() for block in blocks for line in block.split("```")[0].splitlines()]
    return [words for words in lines if "config.yaml" in words]


def test_wrong_number_of_processes_is_refused(config: Path) -> None:
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [*COMMAND, str(config)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "parallel.stages is 2, which takes 2 processes, but torchrun has started 3" in done.stderr
