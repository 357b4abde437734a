"""What this machine has: devices and their memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Machine:
    """The devices that processes of a run get.

    Attributes:
        device: what they are.
        count: GPUs, or cores.
        memory: bytes that are free, of each GPU, or of the machine.
    """

    device: torch.device
    count: int
    memory: int

    @classmethod
    def here(cls, device: str = "auto", processes: int = 1) -> Machine:
        """This machine as ``parallel.device`` sees it: GPUs if there is one for each of the processes, unless the CPU is asked for."""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device == "cuda" or (device == "auto" and gpus >= processes and gpus):
            free = min((torch.cuda.mem_get_info(index)[0] for index in range(gpus)), default=0)
            return cls(torch.device("cuda"), gpus, free)
        return cls(torch.device("cpu"), len(os.sched_getaffinity(0)), _free_memory())

    def of_process(self, processes: int) -> int:
        """Bytes for each process where so many run here."""
        return self.memory if self.device.type == "cuda" else self.memory // processes

    def describe(self) -> str:
        kind = "GPU" if self.device.type == "cuda" else "core"
        return f"{self.count} {kind}{'s' * (self.count != 1)} with {self.memory / 2**30:.1f} GiB free" + (
            " each" if kind == "GPU" and self.count > 1 else ""
        )


def _free_memory() -> int:
    """Bytes that programs can still get, no more than the limit of a container."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limits = [int(text) for path in _LIMITS if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min([free, *limits])
