"""Weights between a checkpoint's layout and the model's: which tensors of the one become which of the other.

Names, and what is stored apart but is one parameter (experts, say), follow from transformers' own conversion tables, in both
directions. A conversion is first run on shapes alone, so that whatever does not fit is known before anything is read.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils.loading_report import LoadStateDictInfo

from infinipipe.model.config import UnsupportedModelError
from infinipipe.model.shards import Shards

_ACTIVATION_SCALES = ("*.activation_scale", "*.input_scale")
_NAMED_AT_MOST = 3


def meta_model(config: PretrainedConfig, kind: Any = AutoModelForCausalLM, **options: Any) -> PreTrainedModel:
    """The whole model without storage. Raises ``UnsupportedModelError`` if there is no causal language model of the kind.

    ``options`` are those of transformers' ``from_config``.
    """
    make: Callable[..., PreTrainedModel] = getattr(kind, "from_config", None) or kind._from_config
    try:
        with torch.device("meta"):
            return make(copy.deepcopy(config), **options)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{config.model_type} cannot be built as a causal language model: {error}"
        ) from None


@dataclass
class _Group:
    """Tensors of a checkpoint that become parameters together.

    Attributes:
        conversion: how; ``None`` if one tensor becomes one parameter as it is.
        first: the first parameter that it makes, in the names of the file's model.
        sources: the tensors, each with the pattern that it matched.
        targets: shapes of what it makes, in the names of the model that trains.
    """

    conversion: WeightConverter | None
    first: str
    sources: list[tuple[str, str]] = field(default_factory=list)
    targets: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def convert(self, model: PreTrainedModel, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """What it makes, in the names of the file's model. Raises whatever the conversion raises."""
        if self.conversion is None:
            return {self.first: read(self.sources[0][1])}
        conversion = copy.deepcopy(self.conversion)
        for pattern, name in self.sources:
            conversion.add_tensor(self.first, name, pattern, _reader(read, name))
        made = conversion.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def __str__(self) -> str:
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return f"{self.sources[0][1]}{more}"


def _reader(read: Callable[[str], Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: read(name)


class HeadDiffersError(ValueError):
    """A checkpoint with a head that differs from the embedding, for a configuration that ties the two; ``reason`` says so."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}; set model.config.tie_word_embeddings to false to train both, or name the head in model.ignore"
        )
        self.reason = reason


class Checkpoint:
    """A checkpoint, understood for one model.

    Args:
        directory: with safetensors in Hugging Face form, and ``config.json`` where the file's model is another than the one
            that trains: multi-modal, or with more layers.
        config: of the model that trains.
        ignore: patterns of names (``*`` matches anything) of tensors that are not to be used.

    Attributes:
        unused: names of the tensors that the model has no use for, by reason.

    Raises ``ValueError`` unless every tensor of the model comes from the checkpoint, with the shape that it has, and every
    tensor of the checkpoint is used or has a reason not to be; ``HeadDiffersError`` if the one that is not is a tied head.
    """

    def __init__(self, directory: str | Path, config: PretrainedConfig, *, ignore: Sequence[str] = ()) -> None:
        path = Path(directory)
        self.directory = path if path.is_dir() else path.parent
        source = _source_config(self.directory) or config
        self._model = meta_model(config)
        self._layout = _model_of_the_file(source)
        self._whole = source.get_text_config() is source
        self._shards = Shards(self.directory, _quantization(source))
        self.unused: dict[str, list[str]] = {}
        self._groups = self._understand(self._names(ignore))
        self._by_target = {name: group for group in self._groups for name in group.targets}
        self._tied = self._tied_names()
        self._require_all()

    def _names(self, ignore: Sequence[str]) -> list[str]:
        """The tensors to use, sorted as transformers does."""
        names = []
        scales = set(self._shards.scales.values())
        for name in sorted(self._shards.tensors, key=dot_natural_key):
            if any(fnmatchcase(name, pattern) for pattern in ignore):
                self._leave("by model.ignore", name)
            elif any(fnmatchcase(name, pattern) for pattern in _ACTIVATION_SCALES):
                self._leave("scales of quantised activations", name)
            elif name not in scales:
                names.append(name)
        for pattern in ignore:
            if not any(fnmatchcase(name, pattern) for name in self._shards.tensors):
                raise ValueError(f"model.ignore names {pattern!r}, but {self.directory} has no such tensor; remove it")
        return names

    def _leave(self, reason: str, name: str) -> None:
        self.unused.setdefault(reason, []).append(name)

    def _understand(self, names: Iterable[str]) -> list[_Group]:
        """Group the tensors by what they become, and run every conversion on shapes."""
        layout, own = self._layout, self._model.state_dict()
        expected = layout.state_dict()
        conversions = get_model_conversion_mapping(layout)
        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        groups: dict[str, _Group] = {}
        unexpected: list[str] = []
        for name in names:
            new, pattern = rename_source_key(name, renamings, converters, layout.base_model_prefix, expected)
            if new not in expected and name in expected:
                new, pattern = rename_source_key(name, [], [], layout.base_model_prefix, expected)
            if new not in expected:
                unexpected.append(name)
                continue
            if pattern is None and new in groups:
                raise ValueError(f"{self.directory}: {groups[new]} and {name} are both {new} of the model; remove one")
            group = groups.setdefault(new, _Group(None if pattern is None else of_pattern[pattern], new))
            group.sources.append((pattern or name, name))
        self._sort_out(unexpected)
        return [group for group in groups.values() if self._try(group, own)]

    def _sort_out(self, unexpected: list[str]) -> None:
        """Leave out what the family's class says is of no use. Raises ``ValueError`` for any other tensor."""
        info = LoadStateDictInfo(
            missing_keys=set(),
            unexpected_keys=set(unexpected),
            mismatched_keys=set(),
            conversion_errors={},
            error_msgs=[],
            skipped_pp_keys=set(),
        )
        self._layout._adjust_missing_and_unexpected_keys(info)
        for name in unexpected:
            if name not in info.unexpected_keys:
                self._leave("of no use to the family", name)
        if strange := sorted(info.unexpected_keys, key=dot_natural_key):
            raise ValueError(
                f"{self.directory} holds {len(strange)} tensor{'s' * (len(strange) > 1)} that the model has no place for, "
                f"{_some(strange)}; check that config.json is of this checkpoint, or name what is not needed in model.ignore"
            )

    def _try(self, group: _Group, own: Mapping[str, Tensor]) -> bool:
        """Convert shapes; whether anything comes out that the model that trains has. Raises ``ValueError`` if it does not fit."""
        shards = self._shards

        def shape_only(name: str) -> Tensor:
            stored = shards.tensors[name]
            return torch.empty(stored.shape, dtype=torch.float32, device="meta")

        self._require_complete(group)
        try:
            made = group.convert(self._layout, shape_only)
        except Exception as error:  # whatever a conversion makes of shapes that it does not expect
            raise ValueError(
                f"{self.directory}: {group} cannot become {group.first} of the model: {' '.join(str(error).split())}"
            ) from None
        for name, tensor in made.items():
            new = self._own_name(name)
            if new is None:
                self.unused.setdefault("not of the language model", []).extend(source for _, source in group.sources)
            elif new in own:
                group.targets[new] = tuple(tensor.shape)
            elif _layer_of(new) >= self._model.config.num_hidden_layers:
                self.unused.setdefault("of layers that model.config leaves out", []).extend(
                    source for _, source in group.sources
                )
            else:
                raise ValueError(f"{self.directory}: {group} becomes {new}, which the model does not have")
        for name, shape in group.targets.items():
            self._require_fit(group, name, shape, own[name])
        return bool(group.targets)

    def _require_complete(self, group: _Group) -> None:
        """Tensors that are numbered, such as experts, must be all there: their places follow from their order."""
        for pattern in {pattern for pattern, _ in group.sources}:
            names = [name.split(".") for used, name in group.sources if used == pattern]
            for column in zip(*names, strict=False):
                if len(set(column)) == 1 or not all(part.isdigit() for part in column):
                    continue
                if missing := sorted(set(range(len(column))) - {int(part) for part in column}):
                    raise ValueError(
                        f"{self.directory} lacks number {missing[0]} of the tensors such as {'.'.join(names[0])} that become "
                        f"{group.first}"
                    )

    def _require_fit(self, group: _Group, name: str, shape: tuple[int, ...], parameter: Tensor) -> None:
        if tuple(parameter.shape) != shape:
            made = f", made of {group}," if group.conversion is not None else ""
            raise ValueError(
                f"{self._shards.tensors[group.sources[0][1]].file}: {name}{made} has shape {shape}, but the model needs "
                f"{tuple(parameter.shape)}"
            )
        for _, source in group.sources:
            dtype = self._shards.tensors[source].dtype
            fits = dtype is not None and dtype.is_floating_point == parameter.is_floating_point()
            if not fits or (dtype == torch.float8_e4m3fn and source not in self._shards.scales):
                raise ValueError(
                    f"{self._shards.tensors[source].file}: {source} is stored as {str(dtype).removeprefix('torch.')} without "
                    "scales that could be read; give the checkpoint in bfloat16"
                )

    def _own_name(self, name: str) -> str | None:
        """A name of the file's model in the model that trains; ``None`` for what is not of the language model."""
        if self._whole:
            return name
        for theirs, ours in self._prefixes.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return None

    @cached_property
    def _prefixes(self) -> dict[str, str]:
        """Where decoder and head are in the file's model, and where in the one that trains."""
        theirs, ours = self._layout, self._model
        pairs = [(model.get_decoder(), model.get_output_embeddings()) for model in (theirs, ours)]
        return {
            f"{name_of(theirs, their_part)}.": f"{name_of(ours, our_part)}."
            for their_part, our_part in zip(*pairs, strict=True)
            if their_part is not None
        }

    def _tied_names(self) -> dict[str, str]:
        """Parameters that the checkpoint need not hold: each with the one that it is tied to and that is there."""
        tied: dict[str, str] = {}
        for target, source in self._model.all_tied_weights_keys.items():
            if target in self._by_target and source in self._by_target:
                if not self._equal(target, source):
                    raise HeadDiffersError(
                        f"{self.directory} holds {target}, which differs from {source} though the configuration ties them"
                    )
            elif source in self._by_target:
                tied[target] = source
            elif target in self._by_target:
                tied[source] = target
        return tied

    def _equal(self, one: str, other: str) -> bool:
        """Whether two parameters that are stored one by one are equal, compared row by row."""
        names = [self._by_target[name].sources[0][1] for name in (one, other)]
        return self._shards.equal(*names)

    def _require_all(self) -> None:
        missing = [name for name in self._model.state_dict() if name not in self._by_target and name not in self._tied]
        if missing:
            more = f" ({len(missing)} such tensors in all)" if len(missing) > 1 else ""
            if self._layout.all_tied_weights_keys and missing == list(self._model._tied_weights_keys or ()):
                more = "; its configuration ties it to the embedding: leave model.config.tie_word_embeddings true"
            raise ValueError(
                f"the checkpoint {self.directory} has no tensor {missing[0]!r}, which the model needs{more}"
            )

    def _read(self, name: str) -> dict[str, Tensor]:
        """The parameters of the group that makes ``name``, under the names of the model that trains."""
        group = self._by_target[name]
        made = group.convert(self._layout, self._shards.read)
        return {own: tensor for key, tensor in made.items() if (own := self._own_name(key)) in group.targets}

    def read_into(self, model: nn.Module) -> None:
        """Fill the parameters and persistent buffers of a stage, one group at a time. Raises ``ValueError``."""
        targets = model.state_dict(keep_vars=True)
        waiting = dict.fromkeys(targets)
        while waiting:
            wanted = next(iter(waiting))
            source = self._tied.get(wanted, wanted)
            if source not in self._by_target:
                raise ValueError(f"the checkpoint {self.directory} has no tensor {wanted!r}, which the model needs")
            made = self._read(source)
            for name in list(waiting):
                if (key := self._tied.get(name, name)) in made:
                    with torch.no_grad():
                        targets[name].copy_(made[key])
                    del waiting[name]

    @property
    def dtype(self) -> torch.dtype:
        """What most of the weights that are used are stored in; for fp8 weights, bfloat16."""
        sizes: Counter[torch.dtype] = Counter()
        for group in self._groups:
            for _, name in group.sources:
                stored = self._shards.tensors[name]
                if stored.dtype is not None and stored.dtype.is_floating_point:
                    sizes[stored.dtype] += stored.nbytes
        most = sizes.most_common(1)[0][0]
        return torch.bfloat16 if most == torch.float8_e4m3fn else most

    def describe(self) -> str:
        """How many tensors are used, and which are not and why, in one line."""
        used = sum(len(group.sources) for group in self._groups)
        line = f"weights of {self.directory}: {used} tensors"
        if scaled := len(self._shards.scales):
            line += f", {scaled} of them in fp8 with scales"
        if self._tied:
            line += f", {', '.join(f'{target} tied to {source}' for target, source in self._tied.items())}"
        for reason, names in self.unused.items():
            line += f"; not used, {reason}: {len(names)}, {_some(names)}"
        return line


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_AT_MOST])
    return shown if len(names) <= _NAMED_AT_MOST else f"such as {shown}"


def _layer_of(name: str) -> int:
    """The layer that a parameter belongs to; -1 if to none."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def name_of(model: nn.Module, module: nn.Module) -> str:
    """The name that a module has in a model."""
    return next(name for name, candidate in model.named_modules() if candidate is module)


def _source_config(directory: Path) -> PretrainedConfig | None:
    """The configuration beside a checkpoint, of the whole model; ``None`` if there is none. Raises ``ValueError``."""
    if not (directory / "config.json").is_file():
        return None
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # whatever a family's class makes of a field that it does not expect
        raise ValueError(
            f"{directory} holds no usable Hugging Face configuration: {' '.join(str(error).split())}"
        ) from None


def _quantization(source: PretrainedConfig) -> Mapping[str, Any] | None:
    """What a configuration says of how weights are stored, itself or in its language model's part."""
    for config in (source, source.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if found := getattr(config, name, None):
                return found if isinstance(found, Mapping) else found.to_dict()
    return None


def _model_of_the_file(source: PretrainedConfig) -> PreTrainedModel:
    """The whole model whose tensors a checkpoint holds, without storage."""
    plain = copy.deepcopy(source)
    for config in (plain, plain.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            vars(config).pop(name, None)
    if source.get_text_config() is source:
        return meta_model(plain)
    for name in source.architectures or ():
        kind = getattr(transformers, name, None)
        if kind is not None and hasattr(kind, "get_output_embeddings") and kind.config_class is type(source):
            return meta_model(plain, kind)
    return meta_model(plain, transformers.AutoModelForImageTextToText)


class HubLayout:
    """The layout in which other programs expect the parameters of a model: names, and experts one by one.

    Args:
        model: whole or trimmed, with storage or without.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        conversions: list[WeightTransform] = get_model_conversion_mapping(model, add_legacy=False)
        self._converters = [
            entry.reverse_transform() for entry in conversions[::-1] if isinstance(entry, WeightConverter)
        ]

    def groups(self, names: Iterable[str]) -> Iterator[list[str]]:
        """The parameters that must be converted together, in order."""
        groups: dict[str, list[str]] = {}
        for name in names:
            key, pattern = apply_converters(name, self._converters)
            groups.setdefault(name if pattern is None else key, []).append(name)
        yield from groups.values()

    def convert(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Whole groups of parameters in the hub's layout, floating-point ones in ``dtype``.

        What the family keeps in float32 whatever the rest is in stays so.
        """
        kept = [re.compile(rf"(^|\.){re.escape(name)}($|\.)") for name in self._model._get_dtype_plan(dtype)]
        cast = {
            name: tensor.to(dtype)
            if tensor.is_floating_point() and not any(pattern.search(name) for pattern in kept)
            else tensor
            for name, tensor in tensors.items()
        }
        converted: dict[str, Tensor] = revert_weight_conversion(self._model, cast)
        return converted
