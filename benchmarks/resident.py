"""What a chunk costs where a stage's parameters stay gathered: an estimate that several benchmarks share."""

from __future__ import annotations

from infinipipe.cost import AnalyticCost
from infinipipe.cost.presets import preset

CHUNK_SHARE = 0.04
"""Share of a calibration's fixed cost per micro-batch that is left.

The 629 ms of the A100 calibration are about what gathering 13.5 GB of parameters twice and scattering their gradients once takes
at some 64 GB/s a node; what a chunk costs without them is launching kernels, about 90 a layer at 8 us: 23 ms.
"""


def resident_preset(name: str, stages: int, *, sequence_parallel: int = 8) -> AnalyticCost:
    """The preset with that share of its fixed cost."""
    fixed = preset(name, stages, sequence_parallel=sequence_parallel).chunk_seconds() * CHUNK_SHARE
    return preset(name, stages, sequence_parallel=sequence_parallel, chunk_seconds=fixed)
