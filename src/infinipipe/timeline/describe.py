"""What pictures say of a chunk, and in which colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from infinipipe.plan import KINDS, Chunk, Direction, Slice, cut_sequences
from infinipipe.timeline.events import Timeline

SHADES: dict[Direction | None, float] = {Direction.FORWARD: 0.82, Direction.BACKWARD: 0.66, None: 0.54}
"""Lightness by which way an action passes through the pipeline; what no other stage waits for is darkest."""


@dataclass(frozen=True, slots=True)
class ChunkDescription:
    """A chunk in words and colours.

    Attributes:
        kind: split, batched or hybrid.
        pipeline: number of its pipeline.
        num_tokens: its tokens.
        context: tokens of its first slice's sequence that earlier chunks have processed.
        slices: its slices, each in words.
        colors: ``#rrggbb`` by the letter of every kind of action.
    """

    kind: str
    pipeline: int
    num_tokens: int
    context: int
    slices: tuple[str, ...]
    colors: dict[str, str]


def describe_chunks(timeline: Timeline) -> list[ChunkDescription]:
    """Every chunk of the timeline. Cut sequences have colours of their own; chunks of whole sequences are grey."""
    chunks = timeline.chunks
    hues = _hues(chunks)
    pieces = {
        sequence: [chunks[index].slices[0] for index in places] for sequence, places in cut_sequences(chunks).items()
    }
    pipeline_of = [number for number, pipeline in enumerate(timeline.pipelines) for _ in pipeline.chunks]
    return [
        ChunkDescription(
            kind=chunk.kind.value,
            pipeline=pipeline_of[index],
            num_tokens=chunk.num_tokens,
            context=chunk.context,
            slices=tuple(_in_words(piece, pieces.get(piece.sequence, ())) for piece in chunk.slices),
            colors={kind.value: _color(chunk, index, hues, lightness=SHADES[row.flow]) for kind, row in KINDS.items()},
        )
        for index, chunk in enumerate(chunks)
    ]


def _in_words(piece: Slice, siblings: Sequence[Slice]) -> str:
    if piece.is_whole:
        return f"sequence {piece.sequence}, all {piece.length:,} tokens"
    number = f", slice {siblings.index(piece) + 1} of {len(siblings)}"
    return f"sequence {piece.sequence}{number}, tokens {piece.start:,} to {piece.stop:,} of {piece.length:,}"


def _hues(chunks: Sequence[Chunk]) -> dict[int, float]:
    """A hue in degrees for every cut sequence, in order of appearance; neighbours are far apart, and none is the red of bubbles."""
    return {
        sequence: 60.0 + (190.0 + 0.618034 * 270.0 * number) % 270.0
        for number, sequence in enumerate(cut_sequences(chunks))
    }


def _color(chunk: Chunk, index: int, hues: dict[int, float], *, lightness: float) -> str:
    if chunk.partial is None:
        return oklch(lightness + (0.0 if index % 2 else 0.035), 0.012, 260.0)
    return oklch(lightness, 0.105, hues[chunk.partial.sequence])


def oklch(lightness: float, chroma: float, hue: float) -> str:
    """An Oklab colour of equal perceived lightness for all hues (degrees) as ``#rrggbb``."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(max(c, 0.0), 1.0))):02x}" for c in linear)


def _gamma(linear: float) -> float:
    return 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
