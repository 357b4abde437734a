"""Hugging Face causal language models as pipeline stages, attention with context, loss in token blocks."""

from infinipipe.model.attention import ChunkContext
from infinipipe.model.config import (
    UnsupportedModelError,
    changed_config,
    check_sizes,
    check_supported,
    covering,
    describe_changes,
    hub_fields,
    load_config,
    model_fields,
    text_config,
)
from infinipipe.model.kv_store import KVStore
from infinipipe.model.linear import AccumulatingLinear, Product, WeightGradients, settle
from infinipipe.model.loss import IGNORE, LossHead, LossTarget, block_loss
from infinipipe.model.stage import SharedWeight, Stage, build_stage
from infinipipe.model.ulysses import SequenceShard, ulysses_degree
from infinipipe.model.weights import Checkpoint, HeadDiffersError, HubLayout, meta_model

__all__ = [
    "IGNORE",
    "AccumulatingLinear",
    "Checkpoint",
    "ChunkContext",
    "HeadDiffersError",
    "HubLayout",
    "KVStore",
    "LossHead",
    "LossTarget",
    "Product",
    "SequenceShard",
    "SharedWeight",
    "Stage",
    "UnsupportedModelError",
    "WeightGradients",
    "block_loss",
    "build_stage",
    "changed_config",
    "check_sizes",
    "check_supported",
    "covering",
    "describe_changes",
    "hub_fields",
    "load_config",
    "meta_model",
    "model_fields",
    "settle",
    "text_config",
    "ulysses_degree",
]
