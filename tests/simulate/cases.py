"""Random plans, and a cost model in round figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from infinipipe.cost import CostTable, table_by_chunk
from infinipipe.plan import Chunk, Pipeline, Placement, Plan, build_replica, cut, whole


@dataclass(frozen=True)
class RoundCost:
    """A cost model whose every figure is easily computed by hand."""

    stage_layers: tuple[int, ...]
    message_latency: float = 0.25
    placed: Placement | None = None

    @property
    def placement(self) -> Placement:
        return self.placed or Placement.plain(len(self.stage_layers))

    def pass_seconds(self, column: str, chunk: Chunk, part: int) -> float:
        forward = 1.0 + sum(s.num_tokens * (1 + s.start + s.num_tokens) for s in chunk.slices) / 64
        return {"forward": 1, "backward": 2, "backward_input": 1.25, "backward_weight": 0.75}[column] * forward

    def recompute_seconds(self, chunk: Chunk, stage: int, layers: int) -> float:
        return self.pass_seconds("forward", chunk, stage) * layers / max(self.stage_layers[stage], 1)

    def message_seconds(self, num_tokens: int) -> float:
        return self.message_latency + num_tokens / 128

    def activation_bytes(self, chunk: Chunk, stage: int, layers: int) -> int:
        return chunk.num_tokens * (10 * (self.stage_layers[stage] - layers) + layers)

    def kv_bytes(self, length: int, stage: int) -> int:
        return 2 * length * self.stage_layers[stage]

    def dkv_bytes(self, length: int, stage: int) -> int:
        return 4 * length * self.stage_layers[stage]

    def weight_operand_bytes(self, chunk: Chunk, part: int) -> int:
        return 6 * chunk.num_tokens * self.stage_layers[part]

    def transient_bytes(self, column: str, chunk: Chunk, part: int, layers: int) -> int:
        if column == "forward":
            return 3 * chunk.num_tokens
        if column == "backward_weight":
            return chunk.num_tokens
        total = self.stage_layers[part]
        need = (7 if 0 < layers == total else 5) * chunk.num_tokens
        if column == "backward_input" and layers:
            # Behind every layer that is computed again, the operands of the others: 6 where there were 10, or 1.
            need = max(need, (7 + (total - 1) * 5 - (total - layers) * 9) * chunk.num_tokens)
        return need

    def message_bytes(self, num_tokens: int) -> int:
        return num_tokens

    def state_bytes(self, stage: int) -> int:
        return 1000 * (stage + 1)

    def table(self, chunks: Sequence[Chunk]) -> CostTable:
        return table_by_chunk(self, chunks)

    @property
    def pair_seconds(self) -> dict[int, float]:
        return {}


def equal_chunks(num_chunks: int) -> tuple[list[int], tuple[Chunk, ...]]:
    """Lengths and chunks of ``num_chunks`` sequences of 8 tokens, one a chunk."""
    lengths = [8] * num_chunks
    return lengths, tuple(Chunk(whole(lengths, [i])) for i in range(num_chunks))


@st.composite
def plans(
    draw: st.DrawFn, *, max_stages: int = 5, max_sequences: int = 8, split: bool = True, parts: bool = True
) -> Plan:
    """Valid plans of one replica: cut and whole sequences, hybrid chunks, several pipelines, any warm-up and recompute.

    Some have backwards in two halves if ``split``, several parts on each stage if ``parts``.
    """
    placement = Placement.plain(draw(st.integers(1, max_stages)))
    if parts and draw(st.integers(0, 2)) == 0:
        make = draw(st.sampled_from([Placement.interleaved, Placement.v_shaped]))
        placement = make(draw(st.integers(1, 3)), draw(st.integers(2, 3)))
    count = placement.num_parts
    stage_layers = tuple(draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=max_sequences))
    pipelines: list[list[Chunk]] = [[]]
    for sequence, length in enumerate(lengths):
        borders = draw(st.lists(st.integers(1, max(length - 1, 1)), max_size=3, unique=True)) if length > 1 else []
        pieces = cut(sequence, length, sorted(borders))
        last = pipelines[-1][-1] if pipelines[-1] else None
        if (
            len(pieces) == 1
            and last is not None
            and (last.partial is None or last.partial.is_tail)
            and draw(st.booleans())
        ):
            pipelines[-1][-1] = Chunk(last.slices + pieces)
            continue
        if pipelines[-1] and draw(st.integers(0, 4)) == 0:
            pipelines.append([])
        pipelines[-1] += [Chunk((piece,)) for piece in pieces]
    num_chunks = sum(map(len, pipelines))
    warmup = None
    if draw(st.booleans()):
        warmup = sorted((draw(st.integers(0, num_chunks)) for _ in range(placement.num_stages)), reverse=True)
    schedules = (["1f1b", "gpipe"] if placement.is_plain else ["interleaved"]) + ["zero-bubble"] * split
    recompute = [[draw(st.integers(0, layers)) for _ in range(num_chunks)] for layers in stage_layers]
    replica = build_replica(
        [Pipeline(tuple(chunks)) for chunks in pipelines],
        placement,
        schedule=draw(st.sampled_from(schedules)),
        warmup=warmup,
        recompute=recompute,
    )
    return Plan(stage_layers, tuple(lengths), (replica,))
