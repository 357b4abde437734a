"""A meter of live bytes: every storage that is allocated while it runs, from its allocation until it is freed."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(TorchDispatchMode):
    """Counts live bytes of the storages that operators allocate within the context, in autograd's backward too.

    What exists before (parameters, preallocated gradients, optimizer states) is not counted, nor is what kernels use
    internally. It observes operators of the calling thread on the CPU; on CUDA the allocator's own statistics serve.

    Attributes:
        current: live bytes now.
        peak: the most live bytes since the start or the last :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._live: dict[int, int] = {}

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.current

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._allocated(leaf)
        return result

    def _allocated(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self.current += storage.nbytes()
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.current -= self._live.pop(key)
