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

    def collect(self, start: int, stop: int, key_grad: Tensor, value_grad: Tensor) -> None:
        """Add what later slices have left for the tokens ``[start, stop)`` to these gradients of them, in place."""
        if self.key_grad is not None and self.value_grad is not None:
            key_grad += self.key_grad[start:stop]
            value_grad += self.value_grad[start:stop]

    def leave(self, first: int, stop: int, key_grad: Tensor, value_grad: Tensor) -> None:
        """Add gradients of the tokens ``[first, stop)`` to what waits for the backward of their slices.

        The first to leave something is the last slice, whose start is then ``stop``: buffers are allocated to end there.
        """
        if self.key_grad is None or self.value_grad is None:
            dtype = torch.promote_types(key_grad.dtype, torch.float32)
            self.key_grad = key_grad.new_zeros((stop, *key_grad.shape[1:]), dtype=dtype)
            self.value_grad = value_grad.new_zeros((stop, *value_grad.shape[1:]), dtype=dtype)
        self.key_grad[first:stop] += key_grad
        self.value_grad[first:stop] += value_grad


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

    def accumulate_gradients(
        self, sequence: int, layer: int, start: int, first_key: int, key_grad: Tensor, value_grad: Tensor
    ) -> None:
        """Add up what the backward of slice ``[start, stop)`` yields with that of later slices; slices come in reverse.

        ``key_grad`` and ``value_grad`` belong to the tokens ``[first_key, stop)`` that the slice attends to::

            first_key ... start ... stop
            [ earlier tokens | own ]        own: what later slices left for them is added, in place
                                            earlier: added to what waits in the store for their slices' backward

        The sequence leaves the store with its first slice.
        """
        entry = self._entry(sequence, layer)
        stop = first_key + key_grad.shape[0]
        if stop != entry.pending:
            raise RuntimeError(
                f"sequence {sequence}, layer {layer}: backward of [{start}, {stop}) when [.., {entry.pending}) is due"
            )
        entry.pending = start
        own = start - first_key
        entry.collect(start, stop, key_grad[own:], value_grad[own:])
        if start == 0:
            del self._entries[sequence, layer]
        else:
            entry.leave(first_key, start, key_grad[:own], value_grad[:own])

    def release(self, sequence: int, layers: range) -> None:
        """Forget a sequence at those layers, whose backward will not come (evaluation)."""
        for layer in layers:
            self._entries.pop((sequence, layer), None)

    @property
    def elements(self) -> int:
        """How many keys and values there is room for, over all sequences and layers."""
        return sum(entry.key.numel() + entry.value.numel() for entry in self._entries.values())

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
