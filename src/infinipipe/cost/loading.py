"""Cost models of a user's own, from Python files: ``path/to/file.py:function``."""

from __future__ import annotations

import numpy as np

from infinipipe.cost.interface import CostModel
from infinipipe.plan import COLUMNS, Chunk, Placement, PlanError, cut
from infinipipe.plan.loading import load_function

_TRIAL = tuple(Chunk((piece,)) for piece in cut(0, 8, [4]))
"""Two slices of a sequence: what a cost model is asked about each must be there."""


def load_model(reference: str, placement: Placement) -> CostModel:
    """The cost model that the function makes for parts placed so: ``function(placement)``.

    Raises ``PlanError`` if the function cannot be loaded, if it fails, or if what it returns is no cost model of these parts.
    """
    model = load_function(reference, "cost model")(placement)
    for name in (name for name in vars(CostModel) if not name.startswith("_")):
        if not hasattr(model, name):
            raise PlanError(
                f"the cost model {reference} returns an object of type {type(model).__name__} without {name!r}; it must have all that "
                "infinipipe.cost.CostModel has"
            )
    if model.placement != placement or len(model.stage_layers) != placement.num_parts:
        raise PlanError(
            f"the cost model {reference} is of the parts {[list(parts) for parts in model.placement.parts]} with "
            f"{list(model.stage_layers)} layers; it must be of those that it is made for, "
            f"{[list(parts) for parts in placement.parts]}"
        )
    try:
        table = model.table(_TRIAL)
        columns = [np.asarray(table.seconds[column], np.float64) for column in COLUMNS]
        _ = [table.transient[column] for column in COLUMNS]
    except Exception as error:
        raise PlanError(
            f"the cost model {reference} fails for a chunk of 4 tokens: {type(error).__name__}: {error}"
        ) from error
    for name, seconds in zip(COLUMNS, columns, strict=True):
        if seconds.shape != (placement.num_parts, len(_TRIAL)) or not (np.isfinite(seconds) & (seconds >= 0)).all():
            raise PlanError(
                f"the cost model {reference} gives as seconds of {name} {seconds.tolist()}; its table must have a number of at least 0 "
                f"for each of {placement.num_parts} parts and {len(_TRIAL)} chunks"
            )
    result: CostModel = model
    return result
