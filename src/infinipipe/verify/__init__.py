"""Proof of exactness: plans run in stages against the plain Hugging Face model in one process."""

from infinipipe.verify.cases import Case, Outcome, run_locally
from infinipipe.verify.distributed import run_in_pool
from infinipipe.verify.families import FAMILIES
from infinipipe.verify.plans import random_plan
from infinipipe.verify.selfcheck import self_check

__all__ = [
    "FAMILIES",
    "Case",
    "Outcome",
    "random_plan",
    "run_in_pool",
    "run_locally",
    "self_check",
]
