"""Sequence parallelism after Ulysses: tokens are split between the processes of a group, in attention heads are.

A chunk's tokens are padded to a multiple of the group's size and dealt in contiguous shares; within attention an all-to-all
gives every process all tokens of its share of the heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class SequenceShard:
    """This process's share: ``index`` of ``size`` processes, which communicate over ``group``."""

    group: dist.ProcessGroup
    index: int
    size: int

    def num_local(self, num_tokens: int) -> int:
        """Tokens of a chunk that each process holds, padding included."""
        return -(-num_tokens // self.size)

    def local(self, x: Tensor, fill: float) -> Tensor:
        """This process's share of the rows of ``x``, those beyond its end set to ``fill``."""
        count = self.num_local(x.shape[0])
        share = x[self.index * count : (self.index + 1) * count]
        missing = count - share.shape[0]
        return pad(share, [0, 0] * (x.dim() - 1) + [0, missing], value=fill) if missing else share

    def kv_copies(self, num_kv_heads: int) -> int:
        """How often each K/V head is repeated so that their number is a multiple of the group's size."""
        return math.lcm(num_kv_heads, self.size) // num_kv_heads

    def to_heads(self, x: Tensor, num_tokens: int) -> Tensor:
        """Local (share of tokens, heads, size) to (``num_tokens``, share of heads, size)."""
        share, heads, size = x.shape
        blocks = x.view(share, self.size, heads // self.size, size).transpose(0, 1)
        return self._exchange(blocks).view(self.size * share, heads // self.size, size)[:num_tokens]

    def to_tokens(self, x: Tensor) -> Tensor:
        """(tokens, share of heads, size) to local (share of tokens, heads, size); the inverse of :meth:`to_heads`."""
        num_tokens, heads, size = x.shape
        share = self.num_local(num_tokens)
        padded = pad(x, [0, 0, 0, 0, 0, self.size * share - num_tokens])
        blocks = self._exchange(padded.view(self.size, share, heads, size))
        return blocks.transpose(0, 1).reshape(share, self.size * heads, size)

    def _exchange(self, blocks: Tensor) -> Tensor:
        """Block ``i`` goes to process ``i``; the result's block ``i`` came from it."""
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=self.group)
        return received


def check_heads(num_heads: int, size: int) -> None:
    """Raise ``ValueError`` if ``size`` processes cannot share the heads."""
    if num_heads % size:
        divisors = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ValueError(
            f"parallel.sequence_parallel is {size}, but the model has {num_heads} attention heads, which that does not "
            f"divide; use one of {divisors}"
        )
