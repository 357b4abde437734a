"""Hugging Face causal language models as pipeline stages, attention with context, loss in token blocks."""

from infinipipe.model.attention import ChunkContext
from infinipipe.model.config import UnsupportedModelError, check_supported, load_config, text_config
from infinipipe.model.kv_store import KVStore
from infinipipe.model.loss import IGNORE, LossHead, LossTarget, block_loss
from infinipipe.model.sequence import SequenceShard, ulysses_degree
from infinipipe.model.stage import Stage, build_stage

__all__ = [
    "IGNORE",
    "ChunkContext",
    "KVStore",
    "LossHead",
    "LossTarget",
    "SequenceShard",
    "Stage",
    "UnsupportedModelError",
    "block_loss",
    "build_stage",
    "check_supported",
    "load_config",
    "text_config",
    "ulysses_degree",
]
