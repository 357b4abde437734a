"""Corpora: documents, tokenizers, tokenized caches and resumable global batches. Imports no torch."""

from infinipipe.data.batches import BatchSampler
from infinipipe.data.corpus import IGNORED, Corpus, Sequences, open_corpus, unigram_entropy
from infinipipe.data.documents import DataError, Document, ReadCounts, find_files, read_documents
from infinipipe.data.settings import DataSettings, TokenizerSettings
from infinipipe.data.tokenizer import load_tokenizer, train_tokenizer

__all__ = [
    "IGNORED",
    "BatchSampler",
    "Corpus",
    "DataError",
    "DataSettings",
    "Document",
    "ReadCounts",
    "Sequences",
    "TokenizerSettings",
    "find_files",
    "load_tokenizer",
    "open_corpus",
    "read_documents",
    "train_tokenizer",
    "unigram_entropy",
]
