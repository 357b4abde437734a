"""Where a process stands in a job: started by this program, by torchrun or by SLURM. Imports no torch."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from infinipipe.settings import SettingError


@dataclass(frozen=True)
class Place:
    """One process of a job.

    Attributes:
        rank: its number among all processes.
        world_size: processes of the job.
        local_rank: its number on its machine.
        starter: what started it, in words.
    """

    rank: int
    world_size: int
    local_rank: int
    starter: str


def find_place(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun or SLURM has given to this process; ``None`` if it was started alone.

    Raises ``SettingError`` for variables that do not fit together.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _place(environment, "RANK", "WORLD_SIZE", "LOCAL_RANK", "torchrun")
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _place(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM")
    return None


def _place(environment: Mapping[str, str], rank: str, size: str, local: str, starter: str) -> Place:
    try:
        place = Place(int(environment[rank]), int(environment[size]), int(environment.get(local, "0")), starter)
    except (KeyError, ValueError):
        raise SettingError(
            f"the environment of {starter} is incomplete: it needs whole numbers {rank} and {size}"
        ) from None
    if not 0 <= place.rank < place.world_size:
        raise SettingError(f"{rank} is {place.rank}, but {size} is {place.world_size}; ranks count from 0")
    return place


def set_rendezvous(environment: MutableMapping[str, str], place: Place) -> None:
    """Complete the variables by which ``torch.distributed`` meets: under SLURM, address and port follow from the job.

    Raises ``SettingError`` where they cannot be found.
    """
    environment["RANK"], environment["WORLD_SIZE"] = str(place.rank), str(place.world_size)
    environment["LOCAL_RANK"] = str(place.local_rank)
    if "MASTER_ADDR" not in environment and place.starter == "SLURM":
        environment["MASTER_ADDR"] = _first_host(environment.get("SLURM_STEP_NODELIST", ""))
        environment.setdefault("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            raise SettingError(f"{place.starter} gave this process a rank, but no {name}; export it, the same for all")


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
