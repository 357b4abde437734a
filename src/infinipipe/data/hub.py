"""Tables of the library ``datasets``: folders that it has saved, and names on the hub. It is imported only here, and when needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinipipe.data.documents import DataError
from infinipipe.data.find import expand
from infinipipe.data.readers import ARROW_ROWS, EXTRA, require_fields, table_chunks
from infinipipe.data.settings import DataSettings
from infinipipe.data.shards import Chunk


@dataclass(frozen=True)
class DatasetShard:
    """A dataset, or one of the shards of a streamed one.

    Attributes:
        name: what messages call it.
        dataset: of the library ``datasets``, iterable or not.
        settings: which columns are read.
    """

    name: str
    dataset: Any
    settings: DataSettings

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self._files())

    def _files(self) -> list[Path]:
        return [Path(file["filename"]) for file in getattr(self.dataset, "cache_files", [])]

    def stamp(self) -> object:
        stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in self._files()]
        return self.name, len(self.dataset), stats

    def chunks(self, skip: int) -> Iterator[Chunk]:
        dataset = self.dataset
        names = dataset.column_names
        if names is not None:
            dataset = dataset.select_columns(require_fields(names, self.name, self.settings))
        rows, done = 0, 0
        if hasattr(dataset, "__len__"):
            rows = len(dataset)
            dataset = dataset.select(range(skip, rows))
        elif skip:
            dataset = dataset.skip(skip)
        for table in dataset.with_format("arrow").iter(ARROW_ROWS):
            if names is None:
                require_fields(table.column_names, self.name, self.settings)
            batches = table.combine_chunks().to_batches()
            yield from _moved(table_chunks(batches, self.name, 0, 0, 0), skip + done, rows, self.size)
            done += table.num_rows


def _moved(chunks: Iterator[Chunk], before: int, rows: int, size: int) -> Iterator[Chunk]:
    """Chunks of a table behind so many other rows."""
    for chunk in chunks:
        first = chunk.first + before
        done = round(size * (first + chunk.count - 1) / rows) if rows else 0
        yield Chunk("table", chunk.names, chunk.records, chunk.count, first, bytes_done=done)


def find_dataset(settings: DataSettings) -> list[DatasetShard]:
    """The dataset that the settings name; if it is streamed, its shards. Raises ``DataError``."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"data.dataset names {settings.dataset!r}, which needs the library datasets, an extra: {EXTRA}"
        ) from None
    split = settings.split or "train"
    folder = Path(expand(settings.dataset))
    try:
        if folder.is_dir():
            if settings.subset:
                raise DataError(
                    f"data.subset is {settings.subset!r}, but {folder} is a folder, which has splits only; leave it out"
                )
            found = _saved(folder, split, datasets)
            return [DatasetShard(f"{settings.dataset}/{split}", found, settings)]
        found = datasets.load_dataset(
            settings.dataset, settings.subset or None, split=split, streaming=settings.streaming
        )
    except DataError:
        raise
    except Exception as error:  # whatever the library, its readers and the network raise
        reason = " ".join(str(error).split())
        raise DataError(
            f"data.dataset: there is no folder {settings.dataset!r}, and no such dataset can be had: {reason}"
        ) from None
    name = ":".join(part for part in (settings.dataset, settings.subset) if part) + f"/{split}"
    if not settings.streaming:
        return [DatasetShard(name, found, settings)]
    count = found.num_shards
    return [DatasetShard(f"{name}[{index}]", found.shard(count, index), settings) for index in range(count)]


def _saved(folder: Path, split: str, datasets: Any) -> Any:
    """A dataset that was saved to a folder, alone or as one of several splits."""
    if not ((folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()):
        raise DataError(
            f"data.dataset: {folder} is no folder that datasets has saved (save_to_disk); name the files in it in data.files"
        )
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever the library makes of a folder that is damaged
        raise DataError(f"data.dataset: {folder} cannot be loaded: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        return found
    if split not in found:
        raise DataError(
            f"data.dataset: {folder} has no split {split!r}; it has {', '.join(found)}; name one in data.split"
        )
    return found[split]
