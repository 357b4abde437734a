"""Discrete-event execution of a plan's action lists against a cost model. Imports no torch."""

from infinipipe.simulate.engine import Engine, Times, makespan
from infinipipe.simulate.simulator import Simulation, simulate, simulate_plan

__all__ = ["Engine", "Simulation", "Times", "makespan", "simulate", "simulate_plan"]
