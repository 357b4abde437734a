"""Time and memory of chunks at stages; hardware and model descriptions. Imports no torch."""

from infinipipe.cost.analytic import AnalyticCost, Link, PassTime
from infinipipe.cost.balance import balanced_stages, typical_length
from infinipipe.cost.files import load_cost, save_cost
from infinipipe.cost.flops import flop_cost, memory_use
from infinipipe.cost.interface import CostModel
from infinipipe.cost.memory import MemoryUse, WorkingSet
from infinipipe.cost.optimizers import OPTIMIZERS, optimizer_moments
from infinipipe.cost.presets import preset, preset_names
from infinipipe.cost.shape import CostError, ModelShape, even_stages
from infinipipe.cost.states import GatherPolicy, GradientPolicy, Holding, state_bytes
from infinipipe.cost.table import CostTable, table_by_chunk

__all__ = [
    "OPTIMIZERS",
    "AnalyticCost",
    "CostError",
    "CostModel",
    "CostTable",
    "GatherPolicy",
    "GradientPolicy",
    "Holding",
    "Link",
    "MemoryUse",
    "ModelShape",
    "PassTime",
    "WorkingSet",
    "balanced_stages",
    "even_stages",
    "flop_cost",
    "load_cost",
    "memory_use",
    "optimizer_moments",
    "preset",
    "preset_names",
    "save_cost",
    "state_bytes",
    "table_by_chunk",
    "typical_length",
]
