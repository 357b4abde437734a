"""Keys, values and their gradients of cut sequences, kept by (sequence, layer) from slice to slice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _Entry:
    """One sequence at one layer. ``written`` and ``pending`` are the borders that forward and backward have reached."""

    key: Tensor
    value: Tensor
    written: int
    pending: int
    key_grad: Tensor | None = None
    value_grad: Tensor | None = None


class KVStore:
    """Preallocated key/value buffers of a stage, and the gradients that later slices leave for earlier ones.

    Keys and values have shape (tokens, K/V heads, head size). Buffers span the whole sequence and are allocated by the
    first write; gradient buffers, in float32 (float64 for float64), span all but the last slice and are allocated by its
    backward. Writes are idempotent: a recomputed slice writes the same place again. Anything out of order raises
    ``RuntimeError``.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], _Entry] = {}

    def write(self, sequence: int, layer: int, length: int, start: int, key: Tensor, value: Tensor) -> None:
        """Store the slice ``[start, start + len(key))`` of a sequence of ``length`` tokens."""
        entry = self._entries.get((sequence, layer))
        if entry is None:
            if start != 0:
                raise RuntimeError(f"sequence {sequence}, layer {layer}: slice at {start} precedes the first slice")
            shape = (length, *key.shape[1:])
            entry = _Entry(key.new_empty(shape), value.new_empty((length, *value.shape[1:])), 0, length)
            self._entries[sequence, layer] = entry
        stop = start + key.shape[0]
        if start == entry.written and stop <= length:
            entry.written = stop
        elif not stop <= entry.written:
            raise RuntimeError(
                f"sequence {sequence}, layer {layer}: slice [{start}, {stop}) is written when the store ends at {entry.written}"
            )
        entry.key[start:stop] = key
        entry.value[start:stop] = value

    def read(self, sequence: int, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values of tokens ``[start, stop)``."""
        entry = self._entry(sequence, layer)
        if stop > entry.written:
            raise RuntimeError(f"sequence {sequence}, layer {layer}: tokens up to {stop} of {entry.written} are read")
        return entry.key[start:stop], entry.value[start:stop]

    def settle(self, sequence: int, layer: int, start: int, reach: int, key_grad: Tensor, value_grad: Tensor) -> None:
        """Account the gradients that the backward of slice ``[start, stop)`` yields, slices in reverse.

        ``key_grad`` and ``value_grad`` belong to the tokens ``[reach, stop)`` that the slice attends to. Those before
        ``start`` are added to the store; to those of the slice itself, what later slices left is added in place. The
        sequence leaves the store with its first slice.
        """
        entry = self._entry(sequence, layer)
        stop = reach + key_grad.shape[0]
        if stop != entry.pending:
            raise RuntimeError(
                f"sequence {sequence}, layer {layer}: backward of [{start}, {stop}) when [.., {entry.pending}) is due"
            )
        entry.pending = start
        if entry.key_grad is not None and entry.value_grad is not None:
            key_grad[start - reach :] += entry.key_grad[start:stop]
            value_grad[start - reach :] += entry.value_grad[start:stop]
        elif start > 0:
            dtype = torch.promote_types(key_grad.dtype, torch.float32)
            entry.key_grad = key_grad.new_zeros((start, *key_grad.shape[1:]), dtype=dtype)
            entry.value_grad = value_grad.new_zeros((start, *value_grad.shape[1:]), dtype=dtype)
        if start == 0:
            del self._entries[sequence, layer]
        else:
            assert entry.key_grad is not None
            assert entry.value_grad is not None
            entry.key_grad[reach:start] += key_grad[: start - reach]
            entry.value_grad[reach:start] += value_grad[: start - reach]

    def release(self, sequence: int, layers: range) -> None:
        """Forget a sequence at those layers, whose backward will not come (evaluation)."""
        for layer in layers:
            self._entries.pop((sequence, layer), None)

    @property
    def sequences(self) -> list[int]:
        """The sequences that are in the store; none at the end of a step."""
        return sorted({sequence for sequence, _ in self._entries})

    def clear(self) -> None:
        """Drop everything, after a step that failed."""
        self._entries.clear()

    def _entry(self, sequence: int, layer: int) -> _Entry:
        entry = self._entries.get((sequence, layer))
        if entry is None:
            raise RuntimeError(f"sequence {sequence}, layer {layer} is not in the key/value store")
        return entry
