"""Runs plans for real with computing replaced by waiting: the executor, its processes and messages, on any small machine."""

from infinipipe.rehearse.rehearsal import MAX_STAGES, Rehearsal, rehearse
from infinipipe.rehearse.stage import WaitingStage, Waits

__all__ = ["MAX_STAGES", "Rehearsal", "WaitingStage", "Waits", "rehearse"]
