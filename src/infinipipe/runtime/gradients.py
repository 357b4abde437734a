"""What gradients need between the last action and the optimizer: shared weights summed, the global norm, clipping."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from infinipipe.model import Stage
from infinipipe.runtime.mesh import Mesh
from infinipipe.runtime.parameters import Parameters
from infinipipe.runtime.sharding import local


def _gradients(parameters: Parameters) -> dict[str, Tensor]:
    """This process's parts of all gradients by parameter name."""
    return {name: local(p.grad) for name, p in parameters.named() if p.grad is not None}


def sync_shared_gradients(stage: Stage, parameters: Parameters, mesh: Mesh) -> None:
    """Sum the gradients of a weight that embedding and head share on different stages.

    Both copies then get the same gradient, and with equal optimizer states they stay equal.
    """
    if stage.shared is not None:
        dist.all_reduce(_gradients(parameters)[stage.shared.name], group=mesh.ends)


def gradient_norm(stage: Stage, parameters: Parameters, mesh: Mesh, among: Collection[str] | None = None) -> float:
    """Euclidean norm of the gradients over all stages and shards, each parameter counted once; of those ``among``, if given.

    Shared gradients must have been summed. A collective of all stages and sequence-parallel processes of a replica.
    """
    gradients = [
        gradient
        for name, gradient in _gradients(parameters).items()
        if stage.owns(name) and (among is None or name in among)
    ]
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=stage.device)
    total = mesh.sum(norm.to(torch.float64).square(), "sequence", "stage")
    return float(total.sqrt())


def clip_gradients(
    stage: Stage, parameters: Parameters, mesh: Mesh, max_norm: float, among: Collection[str] | None = None
) -> float:
    """Scale gradients so that their norm is at most ``max_norm``: all, or those of the parameters ``among``.

    A collective as :func:`gradient_norm`, of which it returns what it was before.
    """
    norm = gradient_norm(stage, parameters, mesh, among)
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0:
        for name, gradient in _gradients(parameters).items():
            if among is None or name in among:
                gradient.mul_(factor)
    return norm
