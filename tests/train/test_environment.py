"""Which process of a job this is, by the environment of its launcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinipipe.settings import SettingError
from infinipipe.train.environment import ProcessEnvironment, read_environment, set_rendezvous

SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "70012"}


def test_alone() -> None:
    assert read_environment({}) is None


def test_torchrun() -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    process = read_environment(environment)
    assert process == ProcessEnvironment(3, 4, 1, "torchrun")
    set_rendezvous(environment, process)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("host", "1")


def test_slurm_step() -> None:
    process = read_environment(SLURM)
    assert process == ProcessEnvironment(2, 4, 0, "SLURM")
    environment = SLURM | {"MASTER_ADDR": "host", "MASTER_PORT": "1"}
    set_rendezvous(environment, process)
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("2", "4", "0")


def test_shell_in_a_slurm_allocation_is_alone() -> None:
    assert read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    assert read_environment({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_slurm_names_the_first_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$3" = "node[1-2]" ] && printf "node1\\nnode2\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    environment = SLURM | {"SLURM_STEP_NODELIST": "node[1-2]"}
    process = read_environment(environment)
    assert process is not None
    set_rendezvous(environment, process)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("node1", "30012")


def test_slurm_without_scontrol_asks_for_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingError, match="export MASTER_ADDR"):
        set_rendezvous(dict(SLURM), ProcessEnvironment(2, 4, 0, "SLURM"))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "whole numbers RANK and WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "ranks count from 0"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "the environment of SLURM is incomplete"),
    ],
)
def test_variables_that_do_not_fit_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        read_environment(environment)


def test_missing_port_is_asked_for() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "host"}
    with pytest.raises(SettingError, match="no MASTER_PORT"):
        set_rendezvous(environment, ProcessEnvironment(0, 1, 0, "torchrun"))
