"""The places of a stage's actions in its list, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infinipipe.plan import Action, ActionKind
from infinipipe.simulate.engine import Integers


@dataclass(frozen=True)
class Positions:
    """Where a stage's actions are: of shape (actions,) ``chunk`` and ``is_forward``, of shape (chunks,) the places."""

    chunk: Integers
    is_forward: NDArray[np.bool_]
    forward_at: Integers
    backward_at: Integers

    @classmethod
    def of(cls, actions: Sequence[Action]) -> Positions:
        """The places in a list that holds the forward and the backward of every chunk."""
        count = len(actions)
        chunk = np.fromiter((action.chunk for action in actions), np.int64, count)
        is_forward = np.fromiter((action.kind is ActionKind.FORWARD for action in actions), np.bool_, count)
        places = np.arange(count)
        forward_at, backward_at = np.empty((2, count // 2), np.int64)
        forward_at[chunk[is_forward]] = places[is_forward]
        backward_at[chunk[~is_forward]] = places[~is_forward]
        return cls(chunk, is_forward, forward_at, backward_at)
