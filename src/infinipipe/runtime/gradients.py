"""What gradients need between the last backward and the optimizer: tied weights summed, the global norm, clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from infinipipe.model import Stage
from infinipipe.runtime.parameters import Parameters


@dataclass(frozen=True)
class PipelineGroups:
    """Communicators over the stages of this process's pipeline.

    ``whole`` spans all stages; ``ends``, the first and the last, is ``None`` on stages between them. Both are ``None`` in
    pipelines of one stage.
    """

    whole: dist.ProcessGroup | None = None
    ends: dist.ProcessGroup | None = None

    @classmethod
    def create(cls, pipelines: Sequence[Sequence[int]]) -> PipelineGroups:
        """Groups for all pipelines, given as global ranks in the order of the stages; returns this process's.

        A collective of the default process group: every process calls it with the same list, members or not.
        """
        own = cls()
        for ranks in pipelines:
            if len(ranks) == 1:
                continue
            whole = dist.new_group(list(ranks))
            ends = dist.new_group([ranks[0], ranks[-1]])
            if dist.get_rank() in ranks:
                own = cls(whole, ends if dist.get_rank() in (ranks[0], ranks[-1]) else None)
        return own


def sync_tied_gradients(stage: Stage, parameters: Parameters, groups: PipelineGroups) -> None:
    """Sum the gradients of a weight that embedding and head share on the first and the last stage.

    Both copies then get the same gradient, and with equal optimizer states they stay equal.
    """
    tied = stage.tied_parameter
    if tied is not None:
        dist.all_reduce(parameters.gradient_of(tied), group=groups.ends)


def gradient_norm(stage: Stage, parameters: Parameters, groups: PipelineGroups) -> float:
    """Euclidean norm of the gradients over all stages, each parameter counted once (after tied gradients were summed)."""
    copy = stage.tied_parameter if stage.is_last and not stage.is_first else None
    skipped = None if copy is None else parameters.gradient_of(copy)
    gradients = [p.grad for _, p in parameters.named() if p.grad is not None and p.grad is not skipped]
    norms = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=stage.device)
    total = norms.to(torch.float64).square()
    if groups.whole is not None:
        dist.all_reduce(total, group=groups.whole)
    return float(total.sqrt())


def clip_gradients(stage: Stage, parameters: Parameters, groups: PipelineGroups, max_norm: float) -> float:
    """Scale all gradients so that their global norm is at most ``max_norm``; returns the norm before."""
    norm = gradient_norm(stage, parameters, groups)
    masters = [parameter for _, parameter in parameters.named()]
    torch.nn.utils.clip_grads_with_norm_(masters, max_norm, torch.tensor(norm, dtype=torch.float64))
    return norm
