"""Corpora: documents, tokenizers, tokenized caches and resumable global batches. Imports no torch."""

from infinipipe.data.batches import Batches, BatchSampler
from infinipipe.data.corpus import Corpus, open_corpus, unigram_entropy
from infinipipe.data.documents import Chat, DataError, Document, ReadCounts
from infinipipe.data.find import find_files
from infinipipe.data.parse import read_documents
from infinipipe.data.progress import Progress
from infinipipe.data.sequences import IGNORED, Sample, Sequences, tokens_by_source
from infinipipe.data.settings import DataSettings, SourceSettings, TokenizerSettings
from infinipipe.data.sources import find_shards
from infinipipe.data.stream import Stream
from infinipipe.data.tokenizer import largest_id, load_tokenizer, train_tokenizer

__all__ = [
    "IGNORED",
    "BatchSampler",
    "Batches",
    "Chat",
    "Corpus",
    "DataError",
    "DataSettings",
    "Document",
    "Progress",
    "ReadCounts",
    "Sample",
    "Sequences",
    "SourceSettings",
    "Stream",
    "TokenizerSettings",
    "find_files",
    "find_shards",
    "largest_id",
    "load_tokenizer",
    "open_corpus",
    "read_documents",
    "tokens_by_source",
    "train_tokenizer",
    "unigram_entropy",
]
