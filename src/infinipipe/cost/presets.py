"""Cost models of known models and hardware, each with its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from infinipipe.cost.analytic import AnalyticCost, Link, PassTime
from infinipipe.cost.flops import memory_use
from infinipipe.cost.network import Network
from infinipipe.cost.shape import CostError, ModelShape, even_stages
from infinipipe.cost.states import Holding, state_bytes
from infinipipe.plan import ONE_EACH, Placement

MODELS: dict[str, ModelShape] = {
    "7b": ModelShape(layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000),
    "13b": ModelShape(layers=40, hidden=5120, intermediate=13824, heads=40, kv_heads=40, head_dim=128, vocab=32000),
    "30b": ModelShape(layers=60, hidden=6656, intermediate=17920, heads=52, kv_heads=52, head_dim=128, vocab=32000),
    "70b": ModelShape(layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, head_dim=128, vocab=32000),
}
"""Shapes of the published LLaMA 7B, 13B and 30B (33B) models and of Llama 2 70B."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured coefficients of one model on one kind of device, whole model, forward and backward together.

    Attributes:
        model: the measured model, a key of ``MODELS``.
        pair, token: seconds per token^2 and per token.
        chunk: seconds per micro-batch whatever its size.
        activation: bytes of activations per token.
        all_to_all: bytes per second of an all-to-all by group size.
        source: where it was published.
    """

    model: str
    pair: float
    token: float
    chunk: float
    activation: float
    all_to_all: dict[int, float]
    source: str


CALIBRATIONS: dict[str, Calibration] = {
    "a100": Calibration(
        model="7b",
        pair=5.128e-9,
        token=0.18396e-3,
        chunk=0.629,
        activation=4.71e6,
        all_to_all={2: 154e9, 4: 137e9, 8: 121e9, 16: 8.7e9},
        source="public calibration of the FlexSP solver for a 7B model on A100 GPUs",
    ),
}

RESIDENT_SHARE = 0.04
"""Share of a calibration's fixed cost per micro-batch that is left where a stage's parameters stay gathered.

The 629 ms of the A100 calibration are about what gathering 13.5 GB of parameters twice and scattering their gradients once takes
at some 64 GB/s a node; what a chunk costs without them is launching kernels, about 90 a layer at 8 us: 23 ms.
"""
FORWARD_SHARE = 1 / 3
"""Forward's share of forward and backward: the backward of a matrix product is two products."""


def preset_names() -> list[str]:
    """Names that :func:`preset` knows."""
    return [f"{model}-{device}" for model in MODELS for device in CALIBRATIONS]


def preset(
    name: str,
    stages: int | Sequence[int],
    *,
    sequence_parallel: int = 8,
    chunk_seconds: float | None = None,
    placement: Placement | None = None,
    holding: Holding | None = None,
) -> AnalyticCost:
    """The cost model ``MODEL-DEVICE`` over ``stages``: their number, or the layers of each.

    With a ``placement`` of several parts on each stage, these are parts.

    Models other than the calibrated one are scaled from it: attention time with layers times query width, the rest with
    weights, fixed cost with parameters, activations with the formula of :func:`memory_use`; ``source`` says so.
    ``holding`` says how a stage's devices hold its states: in bfloat16, sharded over ``sequence_parallel``, parameters kept gathered,
    if not given. The fixed cost of a chunk follows: all of the calibration's where parameters are gathered for every use, else what
    is left of it (:data:`RESIDENT_SHARE`); ``chunk_seconds`` replaces it. Raises ``CostError``.
    """
    known, shape = _known(name)
    holding = holding or Holding(sequence_parallel=sequence_parallel)
    stage_layers = even_stages(shape.layers, stages) if isinstance(stages, int) else tuple(stages)
    if sum(stage_layers) != shape.layers:
        raise CostError(f"stage_layers {list(stage_layers)} must add up to the {shape.layers} layers of {name}")
    measured = MODELS[known.model]
    pair = known.pair / (measured.layers * measured.query_width) * shape.query_width
    token = known.token / (measured.layers * measured.mean_work) * shape.mean_work
    if chunk_seconds is None:
        share = RESIDENT_SHARE if holding.gather_policy == "keep" else 1.0
        chunk_seconds = share * known.chunk * shape.parameters / measured.parameters

    def pass_time(share: float) -> PassTime:
        return PassTime(pair=pair * share, token=token * share, chunk=chunk_seconds * share / shape.layers)

    use = memory_use(shape, element_bytes=2)
    ratio = known.activation / measured.layers / _layer_bytes(measured)
    scaled = " scaled by shape" if shape is not measured else ""
    exchange = known.all_to_all.get(sequence_parallel, min(known.all_to_all.values()))
    return AnalyticCost(
        stage_layers=stage_layers,
        forward=pass_time(FORWARD_SHARE),
        backward=pass_time(1 - FORWARD_SHARE),
        memory=dataclasses.replace(use, layer=ratio * _layer_bytes(shape) - use.layer_kv),
        states=state_bytes(shape, stage_layers, placement, holding),
        placement=placement or ONE_EACH,
        message=Link(latency=20e-6, seconds_per_byte=1 / known.all_to_all[max(known.all_to_all)]),
        sequence_parallel=sequence_parallel,
        all_to_all=Link(latency=20e-6, seconds_per_byte=1 / exchange),
        all_to_all_bytes=2 * 2 * (shape.query_width + shape.kv_width),
        name=name,
        source=known.source + scaled,
        shape=shape,
    )


def _known(name: str) -> tuple[Calibration, ModelShape]:
    """The calibration and the shape of ``MODEL-DEVICE``. Raises ``CostError``."""
    model, _, device = name.rpartition("-")
    if model not in MODELS or device not in CALIBRATIONS:
        raise CostError(f"there is no preset {name!r}; use one of {', '.join(preset_names())}")
    return CALIBRATIONS[device], MODELS[model]


def preset_network(name: str) -> Network:
    """What the devices of a preset exchange at, and pay for a micro-batch of the whole model. Raises ``CostError``."""
    known, shape = _known(name)
    return Network(known.all_to_all, known.chunk * shape.parameters / MODELS[known.model].parameters)


def _layer_bytes(shape: ModelShape) -> float:
    use = memory_use(shape, element_bytes=2)
    return use.layer + use.layer_kv
