"""Discrete-event execution of a plan's action lists against a cost model. Imports no torch."""

from infinipipe.simulate.engine import Engine, Times, makespan

__all__ = ["Engine", "Times", "makespan"]
