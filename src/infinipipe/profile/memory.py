"""Sets the formula of activation bytes against measured ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infinipipe.cost import AnalyticCost, MemoryUse
from infinipipe.cost.work import chunk_work
from infinipipe.plan import ActionKind, Chunk, Plan
from infinipipe.profile.timing import Run, stage_processes

TOLERANCE = 0.02
"""Measured bytes within this of the formula leave it as it is: the rest is buffers of messages on their way."""
BACKWARD_FIELDS = ("backward", "backward_weight", "backward_attention", "backward_context", "weight_gradient")


@dataclass(frozen=True)
class MemoryRatios:
    """Measured over formula, medians; NaN where nothing was measured.

    Attributes:
        kept: activations of a kept layer.
        input: what a recomputed layer holds.
        forward: what a forward needs while it runs.
        backward: what a backward needs while it runs.
    """

    kept: float
    input: float
    forward: float
    backward: float

    def corrected(self, use: MemoryUse) -> MemoryUse:
        """The formula scaled where measured bytes differ from it."""

        def scale(ratio: float) -> float:
            return ratio if abs(ratio - 1) > TOLERANCE else 1.0

        backward = {name: getattr(use, name) * scale(self.backward) for name in BACKWARD_FIELDS}
        return dataclasses.replace(
            use,
            layer=(use.layer + use.layer_kv) * scale(self.kept) - use.layer_kv,
            layer_input=use.layer_input * scale(self.input),
            forward_kept=use.forward_kept * scale(self.forward),
            **backward,
        )


def memory_ratios(runs: Sequence[tuple[Plan, Run]], cost: AnalyticCost) -> MemoryRatios:
    """Compare what plans held, action by action, with ``cost``, whose stages are those measured.

    What actions need while they run is compared on all stages but the last, where head and loss come on top, unless it is
    the only one; and not where the gradient of the embedding, which is known, is the most.
    """
    last = cost.num_stages - 1
    layers_alone = dataclasses.replace(cost, memory=dataclasses.replace(cost.memory, embedding_gradient=0.0))
    kept, inputs, forward, backward = _Ratios(), _Ratios(), _Ratios(), _Ratios()
    for plan, run in runs:
        replica = plan.replicas[0]
        for stage in range(cost.num_stages):
            events = run.events[stage_processes(stage, cost.num_stages, run)[0]]
            layers = cost.stage_layers[stage]
            for action, event in zip(replica.actions[stage], events, strict=True):
                chunk, recomputed = replica.chunks[action.chunk], replica.recompute[stage][action.chunk]
                work, piece = chunk_work(chunk), chunk.partial
                buffer = cost.message_bytes(chunk.num_tokens)
                received, sent = (0 if stage == 0 else buffer), (0 if stage == last else buffer)
                held = cost.activation_bytes(chunk, stage, recomputed)
                if action.kind is ActionKind.FORWARD:
                    store = cost.kv_bytes(piece.length, stage) if piece is not None and piece.start == 0 else 0
                    measured = event.after - event.before + received - sent - store
                    if recomputed == 0 and layers:
                        part = layers * cost.layer_activation(work)
                        kept.add(chunk, measured - held + part, part)
                    elif recomputed == layers and layers:
                        part = layers * cost.memory.layer_input * chunk.num_tokens / cost.sequence_parallel
                        inputs.add(chunk, measured - held + part, part)
                    if stage < last and recomputed < layers:
                        needed = event.peak - event.before + received - store - held
                        forward.add(chunk, needed, cost.forward_transient_bytes(chunk, stage, recomputed))
                elif stage < last or last == 0:
                    store = cost.dkv_bytes(piece.start, stage) if piece is not None and piece.is_tail else 0
                    needed = event.peak - event.before - store
                    expected = cost.backward_transient_bytes(chunk, stage, recomputed)
                    if expected == layers_alone.backward_transient_bytes(chunk, stage, recomputed):
                        backward.add(chunk, needed, expected)
    return MemoryRatios(kept.typical(), inputs.typical(), forward.typical(), backward.typical())


class _Ratios:
    """Measured over expected bytes of chunks."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, float]] = []

    def add(self, chunk: Chunk, measured: float, expected: float) -> None:
        if expected > 0:
            self._rows.append((chunk.num_tokens, measured / expected))

    def typical(self) -> float:
        """The median over the larger half of the chunks, in which what is independent of tokens hardly counts; NaN if empty."""
        if not self._rows:
            return math.nan
        tokens, ratios = np.array(self._rows).T
        return float(np.median(ratios[tokens >= np.median(tokens)]))
