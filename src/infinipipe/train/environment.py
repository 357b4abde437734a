"""Which process of a job this is, from the environment in which torchrun or SLURM started it. Imports no torch."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from infinipipe.settings import SettingError


@dataclass(frozen=True)
class ProcessEnvironment:
    """One process of a job, as its launcher numbers it.

    Attributes:
        rank: its number among all processes.
        world_size: processes of the job.
        local_rank: its number on its machine.
        launcher: what started it, in words.
    """

    rank: int
    world_size: int
    local_rank: int
    launcher: str


def read_environment(environment: Mapping[str, str]) -> ProcessEnvironment | None:
    """What torchrun or SLURM say of this process; ``None`` if it was started alone.

    Raises ``SettingError`` for variables that do not fit together.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _read(environment, "RANK", "WORLD_SIZE", "LOCAL_RANK", "torchrun")
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _read(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM")
    return None


def _read(environment: Mapping[str, str], rank: str, size: str, local: str, launcher: str) -> ProcessEnvironment:
    try:
        process = ProcessEnvironment(
            int(environment[rank]), int(environment[size]), int(environment.get(local, "0")), launcher
        )
    except (KeyError, ValueError):
        raise SettingError(
            f"the environment of {launcher} is incomplete: it needs whole numbers {rank} and {size}"
        ) from None
    if not 0 <= process.rank < process.world_size:
        raise SettingError(f"{rank} is {process.rank}, but {size} is {process.world_size}; ranks count from 0")
    return process


def set_rendezvous(environment: MutableMapping[str, str], process: ProcessEnvironment) -> None:
    """Complete the variables by which ``torch.distributed`` meets: under SLURM, address and port follow from the job.

    Raises ``SettingError`` where they cannot be found.
    """
    environment["RANK"], environment["WORLD_SIZE"] = str(process.rank), str(process.world_size)
    environment["LOCAL_RANK"] = str(process.local_rank)
    if "MASTER_ADDR" not in environment and process.launcher == "SLURM":
        environment["MASTER_ADDR"] = _first_host(environment.get("SLURM_STEP_NODELIST", ""))
        environment.setdefault("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            raise SettingError(
                f"{process.launcher} gave this process a rank, but no {name}; export it, the same for all"
            )


def _first_host(nodes: str) -> str:
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=30
        )
        return listed.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        raise SettingError(
            "the first node of the SLURM step cannot be found with scontrol; export MASTER_ADDR with its address"
        ) from None
