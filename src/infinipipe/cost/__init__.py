"""Time and memory of chunks at stages; hardware and model descriptions. Imports no torch."""

from infinipipe.cost.analytic import AnalyticCost, Link, MemoryUse, PassTime, sequence_work
from infinipipe.cost.flops import flop_cost, memory_use, state_bytes
from infinipipe.cost.interface import CostModel
from infinipipe.cost.shape import CostError, ModelShape, even_stages
from infinipipe.cost.table import CostTable, tabulate

__all__ = [
    "AnalyticCost",
    "CostError",
    "CostModel",
    "CostTable",
    "Link",
    "MemoryUse",
    "ModelShape",
    "PassTime",
    "even_stages",
    "flop_cost",
    "memory_use",
    "sequence_work",
    "state_bytes",
    "tabulate",
]
