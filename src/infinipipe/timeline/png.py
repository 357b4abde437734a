"""Figures as PNG, with a font that comes with the imaging library: the same picture on every machine."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from PIL import Image, ImageDraw, ImageFont

from infinipipe.timeline.figure import Box, Figure, Label, Lines, Point, Polygon, Shape

SUPERSAMPLING = 2
ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def to_png(figure: Figure, *, scale: float = 2.0) -> bytes:
    """The figure as a PNG file of ``scale`` pixels a point."""
    size = (round(figure.width * scale), round(figure.height * scale))
    large = (size[0] * SUPERSAMPLING, size[1] * SUPERSAMPLING)
    image = Image.new("RGB", large, figure.background)
    canvas = ImageDraw.Draw(image)
    for shape in figure.shapes:
        _paint(canvas, shape, scale * SUPERSAMPLING)
    buffer = io.BytesIO()
    image.resize(size, Image.Resampling.BOX).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _paint(canvas: ImageDraw.ImageDraw, shape: Shape, scale: float) -> None:
    match shape:
        case Box(x, y, width, height, fill, edge, _):
            corners = (x * scale, y * scale, max((x + width) * scale - 1, x * scale), (y + height) * scale - 1)
            canvas.rectangle(corners, fill=fill, outline=edge, width=round(scale) if edge else 0)
        case Lines(points, color, width, dashed, pairs):
            for begin, end in _segments(points, dashed=dashed, pairs=pairs):
                line = [begin[0] * scale, begin[1] * scale, end[0] * scale, end[1] * scale]
                canvas.line(line, fill=color, width=max(round(width * scale), 1))
        case Polygon(points, fill):
            canvas.polygon([(x * scale, y * scale) for x, y in points], fill=fill)
        case Label(x, y, text, color, size, anchor, bold):
            font = _font(round(size * scale))
            stroke = max(round(0.012 * size * scale), 1) if bold else 0
            canvas.text(
                (x * scale, y * scale), text, fill=color, font=font, anchor=ANCHORS[anchor], stroke_width=stroke
            )


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _segments(points: Sequence[Point], *, dashed: bool, pairs: bool) -> Iterator[tuple[Point, Point]]:
    """The lines between ``points``, cut into dashes of 5 points with gaps of 4 if ``dashed``."""
    lines = zip(points[::2], points[1::2], strict=True) if pairs else pairwise(points)
    for begin, end in lines:
        if not dashed:
            yield begin, end
            continue
        length = ((end[0] - begin[0]) ** 2 + (end[1] - begin[1]) ** 2) ** 0.5
        done = 0.0
        while done < length:
            a, b = done / length, min(done + 5.0, length) / length
            yield _between(begin, end, a), _between(begin, end, b)
            done += 9.0


def _between(begin: Point, end: Point, share: float) -> Point:
    return begin[0] + share * (end[0] - begin[0]), begin[1] + share * (end[1] - begin[1])
