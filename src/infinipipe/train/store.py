"""The folder of a run's checkpoints: complete ones appear at once by a rename, the newest valid one is found, old ones go.

A checkpoint is a folder ``step-00000100``. Its manifest, written last, lists the size of every file: whatever a crash or a full
disk left incomplete does not fit its manifest, or has none. Imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
VERSION = 1
_PREFIX = "step-"
_UNFINISHED = ".tmp"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or read; the message names it and says what to do."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: optimizer steps that it has behind it.
        position: of the data after them.
        config: the Hugging Face configuration of the model.
        layout: in words, of the job that wrote it.
        settings: of the run, as YAML.
        files: bytes of every other file of the checkpoint.
        version: of this format.
    """

    step: int
    position: dict[str, Any]
    config: dict[str, Any]
    layout: str
    settings: str
    files: dict[str, int]
    version: int = VERSION


class CheckpointFolder:
    """The checkpoints of one run, of which the newest ``keep`` are kept. One process uses it."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self._keep = keep

    def checkpoints(self) -> list[Path]:
        """All finished checkpoints, the newest first, valid or not."""
        found = [path for path in self.path.glob(f"{_PREFIX}*") if path.suffix != _UNFINISHED and path.is_dir()]
        return sorted(found, key=lambda path: path.name, reverse=True)

    def newest(self) -> tuple[Path, Manifest] | None:
        """The newest valid checkpoint, with its manifest."""
        for path in self.checkpoints():
            try:
                return path, read_manifest(path)
            except CheckpointError:
                continue
        return None

    def invalid(self) -> list[str]:
        """Why checkpoints newer than the newest valid one cannot be used."""
        reasons = []
        for path in self.checkpoints():
            try:
                read_manifest(path)
                break
            except CheckpointError as error:
                reasons.append(str(error))
        return reasons

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of ``step`` into; unfinished ones are removed. Raises ``OSError``."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.clean()
        folder = self.path / f"{_PREFIX}{step:08d}{_UNFINISHED}"
        folder.mkdir()
        return folder

    def clean(self) -> None:
        """Remove what was not finished."""
        for path in self.path.glob(f"{_PREFIX}*{_UNFINISHED}"):
            shutil.rmtree(path, ignore_errors=True)

    def commit(self, folder: Path, manifest: Manifest) -> Path:
        """Make a checkpoint out of a folder in which everything but the manifest is written. Raises ``OSError``."""
        beside = folder / f"{MANIFEST}{_UNFINISHED}"
        with beside.open("w") as file:
            json.dump(asdict(manifest), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(folder / MANIFEST)
        target = folder.with_suffix("")
        if target.exists():
            self._remove(target)
        folder.rename(target)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        for old in self.checkpoints()[self._keep :]:
            self._remove(old)
        return target

    def set_aside(self) -> Path | None:
        """Give the folder with all checkpoints in it another name; ``None`` if there are none. Raises ``OSError``."""
        if not self.checkpoints():
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        return self.path.rename(aside)

    def _remove(self, path: Path) -> None:
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of all files of a folder."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there. Raises ``CheckpointError`` saying what is wrong with it."""
    try:
        manifest = Manifest(**json.loads((path / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is no complete checkpoint: its {MANIFEST} cannot be read ({error})") from None
    if manifest.version != VERSION:
        raise CheckpointError(f"{path} has version {manifest.version}; this program reads version {VERSION}")
    for name, size in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"the checkpoint {path} is damaged: its file {name} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"the checkpoint {path} is damaged: {name} has {file.stat().st_size} bytes instead of {size}"
            )
    return manifest
