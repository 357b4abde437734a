"""Planners to compare with: published methods with a pipeline, which make plans, and without one, of which the step's time is known."""

from infinipipe.planner.baselines import pipelined

__all__ = ["pipelined"]
