"""From measured actions to the coefficients of the cost model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from infinipipe.cost import Link, PassTime
from infinipipe.cost.features import Features, chunk_features, mean_features
from infinipipe.plan import Chunk
from infinipipe.profile.regression import Floats, robust_fit, robust_loss

BIAS = 0.05
"""A group of points whose typical error is larger is warned of."""
SMALLEST_GROUP = 5
MANY_SLICES = 4
KNOTS = (128, 256, 512, 1024, 2048, 4096)
"""Tokens from which on a device may work at its best."""
WORTH, LEAST_GAIN = 0.97, 1e-3
"""A knot is kept if it lowers the mean error to this share, and by this much."""


@dataclass(frozen=True)
class Sample:
    """One measured action: ``layers`` of the stage, the first ``recomputed`` of them computed again, and its seconds.

    A forward drops the activations of the first ``dropped`` layers. ``column`` is that of the cost table which it is a sample of.
    ``windows`` are those of the stage's layers, 0 for none; empty if no layer has one. ``shards`` devices share its tokens.
    ``stage`` is where it was measured.
    """

    column: str
    chunk: Chunk
    layers: int
    recomputed: int
    is_first: bool
    is_last: bool
    seconds: float
    windows: tuple[int, ...] = ()
    shards: int = 1
    stage: int = 0
    dropped: int = 0

    def features(self, layers: int) -> Features[float]:
        """A device's share of the mean features of the stage's first ``layers``."""
        windows = self.windows[:layers] or (0,)
        features = mean_features({window: chunk_features(self.chunk, window) for window in windows}, windows)
        return dataclasses.replace(features, **{name: getattr(features, name) / self.shards for name in _SHARED})


_SHARED = ("tokens", "pairs", "crossed", "partial", "reach", "slices")


@dataclass(frozen=True)
class Quality:
    """How a fit does: relative errors at the median and the 90th percentile, and groups that it misses."""

    points: int
    error_p50: float
    error_p90: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Data:
    """Samples as arrays of shape (samples,); ``features`` are a layer's, ``again`` those of a recomputed one."""

    features: Features[Floats]
    again: Features[Floats]
    layers: Floats
    recomputed: Floats
    dropped: Floats
    is_first: Floats
    is_last: Floats
    seconds: Floats

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Data:
        def column(values: Iterable[float]) -> Floats:
            return np.fromiter(values, np.float64, len(samples))

        def columns(each: Sequence[Features[float]]) -> Features[Floats]:
            return Features(*(column(getattr(one, f.name) for one in each) for f in dataclasses.fields(Features)))

        return cls(
            columns([sample.features(sample.layers) for sample in samples]),
            columns([sample.features(sample.recomputed) for sample in samples]),
            *(column(getattr(sample, name) for sample in samples) for name in _COLUMNS),
        )


_COLUMNS = ("layers", "recomputed", "dropped", "is_first", "is_last", "seconds")

_PER_LAYER: dict[str, Callable[[Features[Floats], float], Floats]] = {
    "pair": lambda features, knot: features.pairs - features.crossed,
    "context": lambda features, knot: features.crossed,
    "token": lambda features, knot: features.tokens,
    "slice": lambda features, knot: features.slices,
    "reach": lambda features, knot: features.reach,
    "resumed": lambda features, knot: features.resumed,
    "chunk": lambda features, knot: np.ones_like(features.tokens),
    "short": lambda features, knot: np.maximum(knot - features.tokens, 0.0),
}
_PER_STAGE: dict[str, Callable[[_Data], Floats]] = {
    "stage": lambda data: np.ones_like(data.layers),
    "head_token": lambda data: data.is_last * data.features.tokens,
    "head_chunk": lambda data: data.is_last,
    "embedding_token": lambda data: data.is_first * data.features.tokens,
    "embedding_chunk": lambda data: data.is_first,
}
_DROPPED: dict[str, Callable[[Features[Floats]], Floats]] = {
    "token": lambda features: features.tokens,
    "chunk": lambda features: np.ones_like(features.tokens),
}
"""What a layer's forward takes otherwise if it drops its activations: noting its inputs costs small chunks time, and not having to
write what a backward would need saves large ones some."""
_ENDS = {
    "forward": ("head_token", "head_chunk", "embedding_token"),
    "backward": ("embedding_token", "embedding_chunk", "head_token"),
}
"""What a pass does at the first and the last stage: head and loss compute their gradient in the forward, and the gradient of the
embedding is added up in the backward. The last of each is fitted only where the measured layouts tell it from the rest; else it
is 0."""


def _matrix(data: _Data, knot: float, pass_: str) -> Floats:
    """The column of every coefficient; zeros for those that the pass does not have."""
    kept = {name: data.layers - data.dropped if name in _DROPPED else data.layers for name in _PER_LAYER}
    columns = [column(data.features, knot) * kept[name] for name, column in _PER_LAYER.items()]
    for name, end in _PER_STAGE.items():
        columns.append(end(data) if name in ("stage", *_ENDS[pass_]) else np.zeros_like(data.layers))
    if pass_ == "backward":
        columns += [column(data.again, knot) * data.recomputed for column in _PER_LAYER.values()]
    else:
        columns += [column(data.features) * data.dropped for column in _DROPPED.values()]
    return np.stack(columns, axis=1)


def _tells_ends_apart(data: _Data) -> bool:
    """Whether what a layer, the head and the embedding take for a token can be told from each other."""
    per_token = [
        data.features.tokens * data.layers,
        *(_PER_STAGE[name](data) for name in ("head_token", "embedding_token")),
    ]
    return bool(np.linalg.matrix_rank(np.stack(per_token, axis=1)) == len(per_token))


def _pass_time(names: Iterable[str], values: Iterable[float], knot: float) -> PassTime:
    fields = dict(zip(names, map(float, values), strict=True))
    fields["context"] -= fields["pair"]
    return PassTime(**fields, full=float(knot) if fields["short"] else 0.0)


@dataclass(frozen=True)
class PassFit:
    """Coefficients of one pass.

    Attributes:
        time: of layers that keep their activations.
        recompute: of the layers that a backward computes again.
        dropping: seconds per token and per chunk that a forward's layer takes more, or less, if it drops its activations.
        quality, held_out: how the fit does.
    """

    time: PassTime
    recompute: PassTime | None
    quality: Quality
    held_out: Quality
    dropping: tuple[float, float] = (0.0, 0.0)


def fit_pass(samples: Sequence[Sample], held_out: Sequence[Sample], pass_: str) -> PassFit:
    """Fit a whole pass, ``forward`` or ``backward``, to its samples.

    Errors on ``held_out`` are of a fit without them, the coefficients of a fit with them. Raises ``ValueError`` if there are fewer
    samples than coefficients.
    """
    samples = [sample for sample in samples if sample.column == pass_]
    held_out = [sample for sample in held_out if sample.column == pass_]
    coefficients, knot = _solve(_Data.of(samples), pass_)
    held = _quality(held_out, _predict(_Data.of(held_out), coefficients, knot, pass_))
    everything = [*samples, *held_out]
    data = _Data.of(everything)
    coefficients, knot = _solve(data, pass_)
    quality = _quality(everything, _predict(data, coefficients, knot, pass_))
    names = [*_PER_LAYER, *_PER_STAGE]
    again = coefficients[len(names) :]
    time = _pass_time(names, coefficients[: len(names)], knot)
    dropping = (0.0, 0.0)
    if pass_ == "forward" and data.dropped.any():
        dropping = float(again[0]) - time.token, float(again[1]) - time.chunk
    return PassFit(
        time=time,
        dropping=dropping,
        recompute=_pass_time(_PER_LAYER, again, knot) if pass_ == "backward" else None,
        quality=quality,
        held_out=held,
    )


def fit_weight(samples: Sequence[Sample]) -> tuple[PassTime, Quality] | None:
    """Fit the second half of a backward, which takes time for tokens, for each layer and for each stage; ``None`` if unmeasured."""
    samples = [sample for sample in samples if sample.column == "backward_weight"]
    if not samples:
        return None
    data = _Data.of(samples)
    matrix = np.stack([data.features.tokens * data.layers, data.layers, np.ones_like(data.layers)], axis=1)
    coefficients = robust_fit(matrix, data.seconds)
    token, chunk, stage = map(float, coefficients)
    quality = _quality(samples, matrix @ coefficients / data.seconds)
    return PassTime(pair=0.0, token=token, chunk=chunk, stage=stage), quality


def _predict(data: _Data, coefficients: Floats, knot: float, pass_: str) -> Floats:
    """Predicted over measured seconds."""
    result: Floats = _matrix(data, knot, pass_) @ coefficients / data.seconds
    return result


def _solve(data: _Data, pass_: str) -> tuple[Floats, float]:
    """Coefficients, and the knot that serves best: 0, none, unless another is clearly better."""
    best: tuple[float, Floats, float] | None = None
    apart, last_end = _tells_ends_apart(data), [*_PER_LAYER, *_PER_STAGE].index(_ENDS[pass_][-1])
    for knot in (0.0, *_knots(data.features.tokens)):
        matrix = _matrix(data, knot, pass_)
        if not apart:
            matrix[:, last_end] = 0.0
        if len(data.seconds) < matrix.shape[1]:
            raise ValueError(
                f"{len(data.seconds)} measured {pass_}s are too few for {matrix.shape[1]} coefficients; measure more plans"
            )
        coefficients = robust_fit(matrix, data.seconds)
        loss = robust_loss(matrix, data.seconds, coefficients)
        limit = math.inf if best is None else best[0] if best[2] else min(best[0] * WORTH, best[0] - LEAST_GAIN)
        if loss < limit:
            best = (loss, coefficients, knot)
    assert best is not None
    return best[1], best[2]


def _knots(tokens: Floats) -> list[float]:
    """Knots with enough points on both sides."""
    below = {knot: float(np.mean(tokens < knot)) for knot in KNOTS}
    return [float(knot) for knot, share in below.items() if 0.1 <= share <= 0.9]


def _quality(samples: Sequence[Sample], ratios: Floats) -> Quality:
    if not samples:
        return Quality(0, math.nan, math.nan, ())
    errors = np.abs(ratios - 1)
    warnings = []
    for name, members in _groups(samples).items():
        if len(members) >= SMALLEST_GROUP and abs(bias := float(np.median(ratios[members])) - 1) > BIAS:
            warnings.append(f"{name}: predicted {bias:+.0%} off")
    return Quality(len(samples), float(np.median(errors)), float(np.quantile(errors, 0.9)), tuple(warnings))


def _groups(samples: Sequence[Sample]) -> dict[str, list[int]]:
    """Samples, of which there must be some, by what may make them special."""
    few, many = np.quantile([sample.chunk.num_tokens for sample in samples], [1 / 3, 2 / 3])
    conditions: dict[str, Callable[[Sample], bool]] = {
        f"chunks of up to {few:.0f} tokens": lambda sample: sample.chunk.num_tokens <= few,
        "chunks of middling size": lambda sample: few < sample.chunk.num_tokens <= many,
        f"chunks of more than {many:.0f} tokens": lambda sample: sample.chunk.num_tokens > many,
        "slices with context": lambda sample: sample.chunk.context > 0,
        f"chunks of more than {MANY_SLICES} sequences": lambda sample: len(sample.chunk.slices) > MANY_SLICES,
        "recomputed chunks": lambda sample: sample.recomputed > 0,
    }
    return {name: [i for i, sample in enumerate(samples) if holds(sample)] for name, holds in conditions.items()}


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> Link:
    """Latency and seconds per byte of messages of those sizes."""
    if not num_bytes:
        return Link()
    size = np.array(num_bytes, np.float64)
    latency, per_byte = robust_fit(np.stack([np.ones_like(size), size], axis=1), np.array(seconds))
    return Link(latency=float(latency), seconds_per_byte=float(per_byte))
