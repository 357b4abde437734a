"""A meter of live bytes: every storage that is allocated while it runs, from its allocation until it is freed."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class MemoryMeter(TorchDispatchMode):
    """Counts live bytes of the storages that operators allocate within the context, in autograd's backward too.

    What exists before (parameters, preallocated gradients, optimizer states) is not counted, nor is what kernels use
    internally. It observes operators of the calling thread on the CPU, or on the meta device, what they would allocate; on CUDA the
    allocator's own statistics serve. What it has seen allocated may be freed by any thread.

    Args:
        device_type: of the storages that count.

    Attributes:
        peak: the most live bytes since the start or the last :meth:`reset_peak`.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()
        self.peak = 0
        self._device_type = device_type
        self._current = 0
        self._live: dict[int, int] = {}
        self._freed: deque[int] = deque()

    @property
    def current(self) -> int:
        """Live bytes now."""
        while self._freed:
            self._current -= self._live.pop(self._freed.popleft())
        return self._current

    def size_of(self, storage: int) -> int:
        """Bytes of the storage with that address; 0 if it is not live, or was there before."""
        _ = self.current
        return self._live.get(storage, 0)

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.current

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        before = self.current
        fresh = [
            t
            for t in _tensors(result)
            if t.device.type == self._device_type and t.untyped_storage()._cdata not in self._live
        ]
        if fresh:
            given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
            for tensor in fresh:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self._live:
                    self._live[key] = storage.nbytes()
                    before += storage.nbytes()
                    weakref.finalize(storage, self._freed.append, key).atexit = False
            self._current = before
            self.peak = max(self.peak, before)
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested arguments or results."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from _tensors(item)
