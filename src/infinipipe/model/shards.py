"""Files of a Hugging Face checkpoint: safetensors with an index, read tensor by tensor and written shard by shard."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_SCALE = "_scale_inv"
"""What the name of an fp8 weight's scales ends with, after the weight's own name."""
_ROWS_AT_ONCE = 4096
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """What a file's header says of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize if self.dtype is not None else 1
        return torch.Size(self.shape).numel() * size


class Shards:
    """The tensors of a checkpoint, by name. Scales of fp8 weights are part of these weights.

    Args:
        directory: with ``model.safetensors``, or with shards and their index.
        quantization: what ``config.json`` says of how the weights are stored.

    Attributes:
        tensors: headers of all tensors.
        scales: the name of the scales of each fp8 weight.

    Raises ``ValueError`` for files that are missing, stale, damaged or quantised in a way that cannot be read.
    """

    def __init__(self, directory: Path, quantization: Mapping[str, Any] | None = None) -> None:
        self.directory = directory
        self._block = _block_size(directory, quantization)
        self._files: dict[Path, Any] = {}
        self.tensors: dict[str, Stored] = {}
        for file in self._find_files():
            self._read_header(file)
        listed = self._listed()
        if listed is not None:
            self._check_index(listed)
        self.scales = {
            name.removesuffix(_SCALE): name
            for name in self.tensors
            if name.endswith(_SCALE) and name.removesuffix(_SCALE) in self.tensors
        }

    def _find_files(self) -> list[Path]:
        directory, index, single = self.directory, self.directory / INDEX, self.directory / SINGLE
        if index.is_file() and single.is_file():
            raise ValueError(f"{directory} has both {SINGLE} and {INDEX}; remove the one that is out of date")
        if single.is_file():
            return [single]
        if not index.is_file():
            raise ValueError(f"{directory} has neither {SINGLE} nor {INDEX}; give a checkpoint in safetensors form")
        files = sorted({directory / file for file in self._weight_map().values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{index} names {missing[0]}, which is not there; download the checkpoint anew")
        extra = sorted(path.name for path in directory.iterdir() if _SHARD.fullmatch(path.name) and path not in files)
        if extra:
            raise ValueError(
                f"{directory} has {extra[0]}, which {INDEX} does not name; remove the file, or mend the index"
            )
        return files

    def _weight_map(self) -> dict[str, str]:
        index = self.directory / INDEX
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            if not all(Path(file).name == file for file in weight_map.values()):
                raise ValueError("it names a file outside of its folder")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not a safetensors index: {error}") from None
        return weight_map

    def _listed(self) -> dict[str, str] | None:
        return self._weight_map() if (self.directory / INDEX).is_file() else None

    def _read_header(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                header = file.get_slice(name)
                if name in self.tensors:
                    raise ValueError(f"{path} and {self.tensors[name].file.name} both hold the tensor {name}")
                self.tensors[name] = Stored(path, tuple(header.get_shape()), _DTYPES.get(header.get_dtype()))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is damaged or cut short ({error}); download it anew") from None
        self._files[path] = file

    def _check_index(self, listed: Mapping[str, str]) -> None:
        for name, file in listed.items():
            if name not in self.tensors or self.tensors[name].file.name != file:
                raise ValueError(
                    f"{self.directory / INDEX} says that {file} holds the tensor {name}, which it does not"
                )
        for name, stored in self.tensors.items():
            if name not in listed:
                raise ValueError(f"{stored.file} holds the tensor {name}, which {INDEX} does not name")

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors are equal as they are stored, compared in blocks of rows."""
        stored = self.tensors[one]
        if (stored.shape, stored.dtype) != (self.tensors[other].shape, self.tensors[other].dtype):
            return False
        slices = [self._files[self.tensors[name].file].get_slice(name) for name in (one, other)]
        rows = stored.shape[0]
        return all(
            torch.equal(*(part[start : start + _ROWS_AT_ONCE] for part in slices))
            for start in range(0, rows, _ROWS_AT_ONCE)
        )

    def read(self, name: str) -> Tensor:
        """The tensor, fp8 weights multiplied by their scales, in float32. Raises ``ValueError`` if it is not finite."""
        path = self.tensors[name].file
        try:
            tensor: Tensor = self._files[path].get_tensor(name)
            if tensor.dtype == torch.float8_e4m3fn:
                scales = self._files[self.tensors[self.scales[name]].file].get_tensor(self.scales[name])
                tensor = dequantize(tensor, scales, self._block)
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(f"{path}: the tensor {name} cannot be read: {error}") from None
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{path}: the tensor {name} holds values that are not finite (NaN or infinity)")
        return tensor


def _block_size(directory: Path, quantization: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Rows and columns of fp8 weights that share a scale. Raises ``ValueError`` for other kinds of quantisation."""
    if not quantization:
        return None
    method = quantization.get("quant_method", "an unnamed method")
    if method != "fp8":
        raise ValueError(
            f"the weights in {directory} are quantised by {method}, which cannot be trained on; give the checkpoint in "
            "bfloat16, or have transformers dequantise it"
        )
    block = quantization.get("weight_block_size")
    return None if block is None else (int(block[0]), int(block[1]))


def dequantize(weight: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """An fp8 weight in float32: each block of rows and columns, the last ones cut short, times its scale.

    ``scales`` is one number, or (..., blocks of rows, blocks of columns). Raises ``ValueError`` if it is of another shape.
    """
    if scales.numel() == 1:
        return weight.float() * scales.float()
    rows, columns = weight.shape[-2:]
    grid = None if block is None else (-(-rows // block[0]), -(-columns // block[1]))
    if block is None or tuple(scales.shape) != (*weight.shape[:-2], *grid):  # type: ignore[misc]
        raise ValueError(f"its scales are of shape {tuple(scales.shape)}, which does not fit blocks of {block}")
    spread = scales.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return weight.float() * spread[..., :rows, :columns]


def shard_name(index: int, count: int) -> str:
    """File name of shard ``index``, counted from 0, of ``count``."""
    return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_shard(tensors: Mapping[str, Tensor], directory: Path, index: int, count: int) -> dict[str, int]:
    """Write one shard; returns the bytes of each tensor, for :func:`write_index`. Raises ``OSError``."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, directory / shard_name(index, count), metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    return {name: tensor.nbytes for name, tensor in contiguous.items()}


def write_index(sizes: Sequence[Mapping[str, int]], directory: Path) -> None:
    """Write the index over shards whose tensors :func:`write_shard` returned, in order; none for a single shard."""
    if len(sizes) == 1:
        return
    weight_map = {name: shard_name(i, len(sizes)) for i, shard in enumerate(sizes) for name in shard}
    total = sum(sum(shard.values()) for shard in sizes)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
