"""Streamed sources: tokenized while training goes on, shuffled window by window, with nothing kept on disk.

A window is a row of chunks of at least ``data.shuffle_window`` records. Its sequences are drawn in the order of a hash of their keys, so a place is
told by few numbers: where the window begins, and the last sequence drawn. To go on there, the window is read and tokenized again.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infinipipe.data.cache import CacheBuilder, TokenCache, TokenizedChunk
from infinipipe.data.documents import DataError
from infinipipe.data.keys import Keys, mixed
from infinipipe.data.progress import Reading
from infinipipe.data.sequences import Sample, Sequences, fit_length, sequences_of
from infinipipe.data.settings import DataSettings
from infinipipe.data.shards import Chunk, Shard, read_chunks
from infinipipe.data.sources import left_out
from infinipipe.data.tokenize import Task, tokenizing
from infinipipe.data.workers import Workers


@dataclass(frozen=True)
class StreamedSource:
    """A source to be read again and again."""

    name: str
    shards: list[Shard]
    task: Task


@dataclass(frozen=True)
class Stream:
    """What is trained on, where it is streamed.

    Attributes:
        sources: what is read.
        weights: of the sources in the tokens drawn.
        held_out: share of the documents that are left out, by their hash.
    """

    sources: tuple[StreamedSource, ...]
    weights: tuple[float, ...] | None
    held_out: float

    def batches(self, settings: DataSettings, seed: int) -> StreamedBatches:
        """The global batches of a run. To be closed."""
        return StreamedBatches(self, settings, seed)


def read_sample(source: StreamedSource, reading: Reading) -> TokenCache:
    """The documents of the first window of a source, in the order of its files."""
    spec = source.task.spec
    builder, records = CacheBuilder(spec.dtype, spec.largest), 0
    with Workers(0, tokenizing, source.task) as workers:
        for chunk in workers.map(read_chunks(source.shards)):
            builder.append(chunk)
            builder.counts.files = chunk.shard + 1
            records += chunk.records
            reading.step(len(chunk.lengths), chunk.bytes_done)
            if records >= source.task.settings.shuffle_window:
                break
    return builder.in_memory([shard.name for shard in source.shards])


@dataclass(frozen=True)
class _Place:
    """Where a window begins: the epoch, the hash of the shard's name in it, and records of that shard before."""

    epoch: int = 0
    shard: int = 0
    skip: int = 0


@dataclass(frozen=True)
class _Window:
    """Sequences with the order in which they are drawn."""

    place: _Place
    sequences: Sequences
    order: np.ndarray[Any, np.dtype[np.int64]]
    keys: Keys


class _Producer(threading.Thread):
    """Makes the windows of one source, from ``place`` on, one ahead of what is taken."""

    def __init__(self, source: StreamedSource, seed: int, held_out: float, place: _Place) -> None:
        super().__init__(daemon=True)
        self._source, self._seed, self._held_out, self._start = source, seed, held_out, place
        self._windows: queue.Queue[_Window | BaseException] = queue.Queue(1)
        self._over = threading.Event()
        self.start()

    def take(self) -> _Window:
        """The next window. Raises what making it raised."""
        window = self._windows.get()
        if isinstance(window, BaseException):
            raise window
        return window

    def close(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        settings = self._source.task.settings
        try:
            with Workers(max(1, settings.workers), tokenizing, self._source.task) as workers:
                for window in self._made(workers):
                    if not self._put(window):
                        return
        except BaseException as error:  # raised again where the window is taken
            self._put(error)

    def _put(self, item: _Window | BaseException) -> bool:
        while not self._over.is_set():
            try:
                self._windows.put(item, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False

    def _made(self, workers: Workers[Chunk, TokenizedChunk]) -> Iterator[_Window]:
        start, empty = self._start, False
        for epoch in itertools.count(start.epoch):
            shards = sorted((_hash(shard.name, self._seed, epoch), shard.name, shard) for shard in self._source.shards)
            first = next((i for i, (key, _, _) in enumerate(shards) if key >= start.shard), len(shards))
            skip = start.skip if first < len(shards) and shards[first][0] == start.shard else 0
            found = False
            for window in self._of_epoch(workers, epoch, [(key, shard) for key, _, shard in shards], first, skip):
                found = True
                yield window
            if not found and empty:
                raise DataError(
                    f"the source {self._source.name} has no document to train on from its first to its last record"
                )
            empty, start = not found, _Place()

    def _of_epoch(
        self,
        workers: Workers[Chunk, TokenizedChunk],
        epoch: int,
        shards: Sequence[tuple[int, Shard]],
        first: int,
        skip: int,
    ) -> Iterator[_Window]:
        settings, spec = self._source.task.settings, self._source.task.spec
        names = [shard.name for _, shard in shards]
        builder, records, place = CacheBuilder(spec.dtype, spec.largest), 0, _Place()
        for chunk in workers.map(read_chunks([shard for _, shard in shards], first=first, skip=skip)):
            if self._over.is_set():
                return
            if not records:
                place = _Place(epoch, shards[chunk.shard][0], chunk.skipped)
            builder.append(chunk)
            records += chunk.records
            if records >= settings.shuffle_window:
                yield from self._window(builder.in_memory(names), place)
                builder, records = CacheBuilder(spec.dtype, spec.largest), 0
        if records:
            yield from self._window(builder.in_memory(names), place)

    def _window(self, cache: TokenCache, place: _Place) -> Iterator[_Window]:
        """The window, unless nothing in it is trained on."""
        if not len(cache):
            return
        settings = self._source.task.settings
        pieces, _ = fit_length(cache, settings)
        pieces = pieces.chosen(~left_out(settings, cache)[pieces.documents])
        sequences = sequences_of([cache], [pieces], [self._source.name])
        sequences = sequences.chosen(~sequences.are_below(self._held_out, one_at_least=False))
        if len(sequences):
            keys = mixed(sequences.keys, self._seed, place.epoch)
            order = np.argsort(keys, kind="stable")
            yield _Window(place, sequences, order, keys[order])


def _hash(name: str, seed: int, epoch: int) -> int:
    content = repr((name, seed, epoch)).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


class _Head:
    """The next sequence of a source, and how to come back to it."""

    def __init__(self, source: StreamedSource, seed: int, held_out: float, state: dict[str, Any] | None) -> None:
        saved = state or {"epoch": 0, "shard": 0, "skip": 0}
        self._place = _Place(int(saved["epoch"]), int(saved["shard"]), int(saved["skip"]))
        self._producer = _Producer(source, seed, held_out, self._place)
        self._last: int | None = None if state is None else state["last"]
        self._window: _Window | None = None
        self._saved = state
        self._position = 0

    @property
    def sample(self) -> Sample:
        """The next sequence. Raises ``DataError`` for what cannot be read."""
        window = self._filled()
        return window.sequences.sample(int(window.order[self._position]))

    def advance(self) -> None:
        window = self._filled()
        self._last = int(window.keys[self._position])
        self._position += 1

    def state(self) -> dict[str, Any]:
        if self._window is None:
            return self._saved or {"epoch": 0, "shard": 0, "skip": 0, "last": None}
        return {**vars(self._window.place), "last": self._last}

    def close(self) -> None:
        self._producer.close()

    def _filled(self) -> _Window:
        """The window of the next sequence; of a saved one, what has been drawn already is passed over."""
        while self._window is None or self._position == len(self._window.order):
            window = self._producer.take()
            is_saved = self._window is None and window.place == self._place
            self._last = self._last if is_saved else None
            drawn = 0 if self._last is None else np.searchsorted(window.keys, np.uint64(self._last), side="right")
            self._window, self._position = window, int(drawn)
        return self._window


class StreamedBatches:
    """Global batches of a stream; the processes that tokenize start with the first."""

    def __init__(self, stream: Stream, settings: DataSettings, seed: int) -> None:
        self._stream, self._settings, self._seed = stream, settings, seed
        self._weights = stream.weights or (1.0,)
        self._drawn = [0] * len(stream.sources)
        self._states: list[dict[str, Any] | None] = [None] * len(stream.sources)
        self._heads: list[_Head] = []

    def next(self) -> list[Sample]:
        """The sequences of the next batch. Raises ``DataError`` for what cannot be read."""
        if not self._heads:
            self._heads = [
                _Head(source, self._seed, self._stream.held_out, state)
                for source, state in zip(self._stream.sources, self._states, strict=True)
            ]
        batch: list[Sample] = []
        tokens, limit = 0, self._settings.tokens_per_step
        while len(batch) < self._settings.sequences_per_step:
            source = min(range(len(self._heads)), key=lambda s: self._drawn[s] / self._weights[s])
            sample = self._heads[source].sample
            tokens += sample.length
            if batch and 0 < limit < tokens:
                break
            batch.append(sample)
            self._drawn[source] += sample.length
            self._heads[source].advance()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands behind the last batch."""
        states = [head.state() for head in self._heads] or [state or {} for state in self._states]
        return {"stream": states, "drawn": list(self._drawn), "settings": self._digest()}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Go on where ``state`` was taken, before the first batch; returns lines for the log. Raises ``DataError`` if it is of another stream."""
        if state.get("settings") != self._digest():
            raise DataError(
                "the saved position belongs to another corpus, seed or batch size, or to one that is not streamed; restore the "
                "data settings of that run"
            )
        assert not self._heads, "a position is loaded before the first batch"
        self._states = [saved or None for saved in state["stream"]]
        self._drawn = [int(drawn) for drawn in state["drawn"]]
        return []

    def close(self) -> None:
        """End the threads and processes that tokenize."""
        for head in self._heads:
            head.close()
        self._heads = []

    def _digest(self) -> str:
        names = [source.name for source in self._stream.sources]
        settings = self._settings
        said = (
            names,
            self._seed,
            settings.sequences_per_step,
            settings.tokens_per_step,
            settings.shuffle_window,
            self._weights,
        )
        return hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()
