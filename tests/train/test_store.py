"""The folder of checkpoints: what counts as valid, what is kept; the lock on an output folder; how a hang is found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinipipe.settings import SettingError
from infinipipe.train.heartbeat import Heartbeat, State, find_hang, read_state
from infinipipe.train.interrupt import StopRequest
from infinipipe.train.lock import OutputLock
from infinipipe.train.settings import ParallelSettings
from infinipipe.train.store import CheckpointError, CheckpointFolder, Manifest, file_sizes, read_manifest


def add(store: CheckpointFolder, step: int) -> Path:
    folder = store.begin(step)
    (folder / "data").write_bytes(bytes(step))
    manifest = Manifest(step, {"epoch": 0}, {"layers": 2}, "1 stage", "", file_sizes(folder))
    return store.commit(folder, manifest)


def test_newest_valid_is_found_and_old_ones_go(tmp_path: Path) -> None:
    store = CheckpointFolder(tmp_path / "checkpoints", keep=3)
    assert store.newest() is None
    for step in (10, 20, 30, 100):
        add(store, step)
    assert [path.name for path in store.checkpoints()] == ["step-00000100", "step-00000030", "step-00000020"]
    newest = store.newest()
    assert newest is not None
    assert (newest[0].name, newest[1].step) == ("step-00000100", 100)
    (newest[0] / "data").write_bytes(b"short")
    (tmp_path / "checkpoints" / "step-00000030" / "manifest.json").write_text('{"step": 30')
    found = store.newest()
    assert found is not None
    assert found[1].step == 20
    first, second = store.invalid()
    assert "step-00000100 is damaged: data has 5 bytes instead of 100" in first
    assert "step-00000030 is no complete checkpoint" in second


def test_unfinished_are_never_read_and_are_removed(tmp_path: Path) -> None:
    store = CheckpointFolder(tmp_path, keep=1)
    folder = store.begin(5)
    (folder / "data").write_bytes(b"x")
    assert store.newest() is None
    add(store, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


def test_other_versions_and_missing_files_are_refused(tmp_path: Path) -> None:
    store = CheckpointFolder(tmp_path, keep=1)
    path = add(store, 1)
    (path / "data").unlink()
    with pytest.raises(CheckpointError, match="its file data is missing"):
        read_manifest(path)
    fields = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(fields | {"version": 9}))
    with pytest.raises(CheckpointError, match="has version 9"):
        read_manifest(path)


def test_set_aside(tmp_path: Path) -> None:
    store = CheckpointFolder(tmp_path / "checkpoints", keep=1)
    assert store.set_aside() is None
    for number in (1, 2):
        add(store, number)
        assert store.set_aside() == tmp_path / f"checkpoints.{number}"
    assert store.newest() is None


def test_one_job_in_an_output_folder(tmp_path: Path) -> None:
    lock = OutputLock(tmp_path)
    with pytest.raises(SettingError, match=rf"is in use by process {os.getpid()} on "):
        OutputLock(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.descriptor])
    lock.release()
    with pytest.raises(SettingError, match="is in use"):
        OutputLock(tmp_path)
    child.communicate(b"\n")
    OutputLock(tmp_path).release()
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="cannot be written"):
        OutputLock(tmp_path / "file" / "below")


def test_a_process_says_what_it_does(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, 3)
    heartbeat.doing("F12, forward of a chunk of 9 tokens")
    state = read_state(tmp_path, 3)
    assert state is not None
    assert state.action == "F12, forward of a chunk of 9 tokens"
    assert state.since == pytest.approx(time.time(), abs=5)
    assert read_state(tmp_path, 4) is None


def test_who_hangs() -> None:
    waits = State("waiting for the input of F1", since=100, alive=199)
    works = State("B3, backward", since=90, alive=199)
    dead = State("waiting for the plan", since=95, alive=101)
    assert find_hang([waits, works], 101, 200) is None
    hang = find_hang([waits, works, waits], 50, 200)
    assert hang is not None
    assert (hang.rank, "last action: B3" in hang.message) == (1, True)
    hang = find_hang([works, waits, dead], 50, 200)
    assert hang is not None
    assert (hang.rank, hang.message.startswith("does not answer")) == (2, True)
    hang = find_hang([waits, None], 50, 200)
    assert hang is not None
    assert (hang.rank, "has not started" in hang.message) == (1, True)
    assert find_hang([None, None], 50, 200) is None


def test_names_of_ranks() -> None:
    parallel = ParallelSettings(replicas=2, stages=2, sequence_parallel=3)
    assert parallel.num_processes == 12
    assert parallel.layout == "2 replicas x 2 stages x 3 sequence-parallel"
    assert parallel.name_of(10) == "rank 10 (replica 1, stage 1, sequence 1)"
    turned = ParallelSettings(replicas=2, stages=2, mesh_order=["stage", "replica", "sequence"])
    assert turned.name_of(2) == "rank 2 (replica 0, stage 1)"
    assert ParallelSettings(stages=2).name_of(1) == "rank 1 (stage 1)"


def test_signals_are_noted_within_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
    assert signal.getsignal(signal.SIGTERM) == before
