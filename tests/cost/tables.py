"""Two cost tables side by side."""

from __future__ import annotations

import numpy as np

from infinipipe.cost import CostTable
from infinipipe.plan import COLUMNS, RESOURCES


def assert_same_table(fast: CostTable, slow: CostTable, *, rtol: float = 1e-12, atol: float = 1.0) -> None:
    """Seconds agree to ``rtol``, bytes to ``atol``, for the rounding of each figure to a whole number."""
    assert (fast.stage_layers, fast.placement) == (slow.stage_layers, slow.placement)
    for column in COLUMNS:
        np.testing.assert_allclose(fast.seconds[column], slow.seconds[column], rtol=rtol)
        for share in (0.0, 0.5, 1.0):
            layers = np.repeat(np.floor(share * np.array(fast.stage_layers))[:, None], fast.num_chunks, axis=1)
            np.testing.assert_allclose(fast.transient_at(column, layers), slow.transient_at(column, layers), atol=atol)
    np.testing.assert_allclose(fast.recompute, slow.recompute, rtol=rtol)
    np.testing.assert_allclose(fast.message, slow.message, rtol=rtol)
    assert fast.held.keys() == slow.held.keys() == {resource.name for resource in RESOURCES}
    for name, size in fast.held.items():
        np.testing.assert_allclose(size, slow.held[name], atol=atol)
    used = np.array(fast.stage_layers)[:, None] > 0
    np.testing.assert_allclose(fast.layer_saving * used, slow.layer_saving * used, atol=atol)
    np.testing.assert_allclose(fast.message_bytes, slow.message_bytes)
