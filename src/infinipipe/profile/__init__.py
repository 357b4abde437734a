"""Measures the real runtime and fits the cost file."""

from infinipipe.profile.design import Design
from infinipipe.profile.session import (
    Measured,
    Parts,
    Profile,
    fit_profile,
    fit_samples,
    formula,
    measure,
    quality_lines,
)
from infinipipe.profile.workers import Setup

__all__ = [
    "Design",
    "Measured",
    "Parts",
    "Profile",
    "Setup",
    "fit_profile",
    "fit_samples",
    "formula",
    "measure",
    "quality_lines",
]
