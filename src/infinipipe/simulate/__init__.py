"""Discrete-event execution of a plan's action lists against a cost model. Imports no torch."""

from infinipipe.simulate.engine import Engine, Times
from infinipipe.simulate.simulator import Simulation, require_same_stages, simulate, simulate_plan

__all__ = ["Engine", "Simulation", "Times", "require_same_stages", "simulate", "simulate_plan"]
