"""Checkpoints to resume from, written and read by all processes with ``torch.distributed.checkpoint``.

Tensors are stored under Hugging Face's parameter names, whole in meaning and sharded on disk, so that any layout reads what any
other wrote. A weight that embedding and head share is stored once, under the embedding's name.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from infinipipe.model import Stage
from infinipipe.runtime import Mesh, Parameters
from infinipipe.runtime.mesh import DIMENSIONS
from infinipipe.train.job import Job
from infinipipe.train.optimizer import state_names
from infinipipe.train.store import CheckpointError, CheckpointFolder, Manifest, file_sizes, read_manifest


class _Writer(dcp.FileSystemWriter):
    """Reports what the operating system refused, where the serializer has another error in its place."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise cause from None


class Checkpoints:
    """Writes and reads the state of one process, together with all others of the job: methods are collectives.

    Why a checkpoint could not be written is returned, the same on all ranks, and never raised.

    Args:
        folder: where the checkpoints are.
        background: whether training goes on while one is written.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        job: Job,
        mesh: Mesh,
        stage: Stage,
        parameters: Parameters,
        optimizer: torch.optim.Optimizer,
        *,
        background: bool,
    ) -> None:
        self._folder = folder
        self._job = job
        self._stage = stage
        self._parameters = parameters
        self._optimizer = optimizer
        self._kept = state_names(optimizer)
        self._copies = background
        self._devices = mesh.devices
        if mesh.sharding() is not None and job.device.type != "cpu":
            self._devices = DeviceMesh("cpu", mesh.layout.ranks(), mesh_dim_names=DIMENSIONS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None

    def save(self, manifest: Manifest, *, wait: bool = False) -> str | None:
        """Begin to write a checkpoint, after :meth:`finish`; ``manifest`` is completed with its files.

        Waits until it is written if asked to, and unless training goes on meanwhile. Returns on all ranks why it could not be
        written, as far as that is known then. The state in memory is untouched either way.
        """
        folder, refusal = self._job.on_first(lambda: self._begin(manifest.step))
        if folder is None:
            return refusal
        state = {name: self._snapshot(tensor) for name, tensor in self._state().items()}
        self._pending = (manifest.step, self._thread.submit(self._write, folder, state, manifest))
        return self.finish() if wait or not self._copies else None

    def _begin(self, step: int) -> tuple[Path | None, str]:
        """An empty folder for the checkpoint of ``step``, or why there is none."""
        try:
            return self._folder.begin(step), ""
        except OSError as error:
            return None, self._refusal(step, error)

    def _write(self, folder: Path, state: dict[str, Tensor], manifest: Manifest) -> None:
        dcp.save(state, storage_writer=_Writer(folder), process_group=self._job.background)
        try:
            if self._job.is_first:
                self._folder.commit(folder, replace(manifest, files=file_sizes(folder)))
        finally:
            # A process that ended before the commit would have its launcher end rank 0 too.
            dist.barrier(group=self._job.background)

    def poll(self) -> str | None:
        """Why the checkpoint that was being written failed, on all ranks, if it has ended so far."""
        if self._pending is None or not self._job.on_first(self._pending[1].done):
            return None
        return self.finish()

    def finish(self) -> str | None:
        """Wait until the checkpoint is written, if there is one; why it failed, if so, on all ranks."""
        if self._pending is None:
            return None
        step, future = self._pending
        self._pending = None
        error = future.exception()
        return self._job.on_first(lambda: None if error is None else self._failed(step, error))

    def close(self) -> None:
        """Let what is being written end, also where this process is about to fail. No collective of its own."""
        self._thread.shutdown()

    def _failed(self, step: int, error: BaseException) -> str:
        self._folder.clean()
        return self._refusal(step, error)

    def _refusal(self, step: int, error: BaseException) -> str:
        if isinstance(error, CheckpointException) and error.failures:
            error = next(iter(error.failures.values()))[0]
        newest = self._folder.newest()
        behind = "there is none before it" if newest is None else f"that of step {newest[1].step} is still there"
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"the checkpoint of step {step} could not be written to {self._folder.path}: {reason}; {behind}"

    def load(self, path: Path) -> None:
        """Read the state of weights, optimizer and random numbers, whatever layout wrote it. Raises ``CheckpointError``."""
        for _, parameter in self._parameters.named():
            self._optimizer.state[parameter] = self._kept.empty(parameter)
        state = self._state(with_copies=True)
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(path), process_group=self._job.background)
        except (CheckpointException, RuntimeError, OSError, KeyError) as error:
            raise CheckpointError(f"the checkpoint {path} cannot be read: {' '.join(str(error).split())}") from None
        step = self._job.on_first(lambda: read_manifest(path).step)
        for _, parameter in self._parameters.named():
            if self._kept.counts:
                self._optimizer.state[parameter]["step"].fill_(step)
        torch.set_rng_state(state["rng"])
        self._parameters.publish()

    def _state(self, *, with_copies: bool = False) -> dict[str, Tensor]:
        """All of this stage's tensors by the names under which they are stored.

        A copy of another stage's weight is stored there, and read here too if ``with_copies``.
        """
        state: dict[str, Tensor] = {"rng": torch.get_rng_state()}
        for name, parameter in self._parameters.named():
            if with_copies or self._stage.owns(name):
                self._add(state, self._stage.stored_name(name), parameter)
        persistent = self._stage.model.state_dict()
        for name, buffer in self._stage.model.named_buffers():
            if name in persistent:
                state[f"buffer.{name}"] = buffer
        return state

    def _add(self, state: dict[str, Tensor], name: str, parameter: torch.nn.Parameter) -> None:
        state[f"model.{name}"] = parameter.detach()
        for kept in (*self._kept.moments, *self._kept.numbers):
            state[f"{kept}.{name}"] = self._optimizer.state[parameter][kept]

    def _snapshot(self, tensor: Tensor) -> Tensor:
        """The tensor on the CPU, a copy if training goes on."""
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        host = own.cpu()
        if self._copies and host.data_ptr() == own.data_ptr():
            host = host.clone()
        if not isinstance(tensor, DTensor):
            return host
        names = tensor.device_mesh.mesh_dim_names
        assert names is not None
        mesh = self._devices[names[0]] if len(names) == 1 else self._devices[names]
        return DTensor.from_local(
            host, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
