"""Sequence parallelism (DeepSpeed Ulysses): tokens are split between the processes of a group; within attention, heads are, too.

A chunk's tokens are padded to a multiple of the group's size and dealt in contiguous shares. Within attention an all-to-all
over ``ulysses`` processes gives each all of their tokens for its share of the heads. Where the group is
larger than the heads allow, those sets of processes form a second dimension: each keeps the queries of its block of tokens,
gathers the keys and values of all blocks, and scatters their gradients back, summed.
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
    """This process's share of a chunk.

    Attributes:
        index, size: which share of how many.
        heads: the ``ulysses`` consecutive processes that exchange tokens for heads.
        ulysses: their number.
        blocks: the processes with the same heads, one for each block of tokens; ``None`` if there is one block.
    """

    index: int
    size: int
    heads: dist.ProcessGroup
    ulysses: int
    blocks: dist.ProcessGroup | None = None

    def num_local(self, num_tokens: int) -> int:
        """Tokens of a chunk that each process holds, padding included."""
        return -(-num_tokens // self.size)

    def local(self, x: Tensor, fill: float) -> Tensor:
        """This process's share of the rows of ``x``, those beyond its end set to ``fill``."""
        count = self.num_local(x.shape[0])
        share = x[self.index * count : (self.index + 1) * count]
        missing = count - share.shape[0]
        return pad(share, [0, 0] * (x.dim() - 1) + [0, missing], value=fill) if missing else share

    def block(self, num_tokens: int) -> tuple[int, int]:
        """The chunk's tokens ``[first, end)`` whose queries this process computes."""
        rows = self.ulysses * self.num_local(num_tokens)
        first = min(self.index // self.ulysses * rows, num_tokens)
        return first, min(first + rows, num_tokens)

    def kv_copies(self, num_kv_heads: int) -> int:
        """How often each K/V head is repeated so that their number is a multiple of ``ulysses``."""
        return math.lcm(num_kv_heads, self.ulysses) // num_kv_heads

    def to_heads(self, x: Tensor, num_tokens: int) -> Tensor:
        """Local (share of tokens, heads, size) to (block of tokens, share of heads, size)."""
        share, heads, size = x.shape
        blocks = x.view(share, self.ulysses, heads // self.ulysses, size).transpose(0, 1)
        first, end = self.block(num_tokens)
        return self._exchange(blocks).view(self.ulysses * share, heads // self.ulysses, size)[: end - first]

    def to_tokens(self, x: Tensor, num_tokens: int) -> Tensor:
        """(block of tokens, share of heads, size) to local (share of tokens, heads, size); undoes :meth:`to_heads`."""
        rows, heads, size = x.shape
        share = self.num_local(num_tokens)
        padded = _pad_rows(x, self.ulysses * share - rows)
        blocks = self._exchange(padded.view(self.ulysses, share, heads, size))
        return blocks.transpose(0, 1).reshape(share, self.ulysses * heads, size)

    def gather_blocks(self, x: Tensor, num_tokens: int) -> Tensor:
        """(block of tokens, ...) of every process to (``num_tokens``, ...) on each."""
        if self.blocks is None:
            return x
        rows = self.ulysses * self.num_local(num_tokens)
        gathered = x.new_empty((self.size // self.ulysses * rows, *x.shape[1:]))
        dist.all_gather_single(gathered, _pad_rows(x, rows - x.shape[0]).contiguous(), group=self.blocks)
        return gathered[:num_tokens]

    def scatter_blocks(self, x: Tensor) -> Tensor:
        """(tokens, ...) of every process, summed, to each one's (block of tokens, ...); for gradients of the gathered."""
        if self.blocks is None:
            return x
        num_tokens = x.shape[0]
        rows = self.ulysses * self.num_local(num_tokens)
        first, end = self.block(num_tokens)
        summed = x.new_empty((rows, *x.shape[1:]))
        padded = _pad_rows(x, self.size // self.ulysses * rows - num_tokens).contiguous()
        dist.reduce_scatter_single(summed, padded, group=self.blocks)
        return summed[: end - first]

    def _exchange(self, blocks: Tensor) -> Tensor:
        """Part ``i`` goes to process ``i`` of :attr:`heads`; the result's part ``i`` came from it."""
        if self.ulysses == 1:
            return blocks
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=self.heads)
        return received


def _pad_rows(x: Tensor, count: int) -> Tensor:
    """``x`` with ``count`` more rows of zeros."""
    return pad(x, [0, 0] * (x.dim() - 1) + [0, count]) if count else x


def ulysses_degree(num_heads: int, size: int) -> int:
    """How many of ``size`` sequence-parallel processes share the heads: as many as divide both."""
    return math.gcd(num_heads, size)
