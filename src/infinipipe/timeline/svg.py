"""Figures as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from infinipipe.timeline.figure import Box, Figure, Label, Lines, Point, Polygon, Shape

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def to_svg(figure: Figure) -> str:
    """The figure as an SVG document."""
    size = f'width="{figure.width:g}" height="{figure.height:g}" viewBox="0 0 {figure.width:g} {figure.height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family={quoteattr(FONT)}>'
    ground = f'<rect width="100%" height="100%" fill="{figure.background}"/>'
    return "\n".join([head, ground, *map(_element, figure.shapes), "</svg>", ""])


def _element(shape: Shape) -> str:
    match shape:
        case Box(x, y, width, height, fill, edge, title):
            inset = 0.5 if edge else 0.0
            place = f'x="{x + inset:.2f}" y="{y + inset:.2f}" width="{max(width - 2 * inset, 0):.2f}" height="{height - 2 * inset:.2f}"'
            stroke = f' stroke="{edge}"' if edge else ""
            inner = f"<title>{escape(title)}</title>" if title else ""
            return f'<rect {place} fill="{fill}"{stroke}>{inner}</rect>'
        case Lines(points, color, width, dashed, pairs):
            dash = ' stroke-dasharray="5 4"' if dashed else ""
            return (
                f'<path d="{_path(points, pairs=pairs)}" fill="none" stroke="{color}" stroke-width="{width:g}"{dash}/>'
            )
        case Polygon(points, fill):
            return f'<path d="{_path(points, pairs=False)}Z" fill="{fill}"/>'
        case Label(x, y, text, color, size, anchor, bold):
            weight = ' font-weight="600"' if bold else ""
            place = f'x="{x:.2f}" y="{y:.2f}" dominant-baseline="central" text-anchor="{anchor}"'
            return f'<text {place} font-size="{size:g}" fill="{color}"{weight}>{escape(text)}</text>'


def _path(points: Sequence[Point], *, pairs: bool) -> str:
    return "".join(
        f"{'M' if number == 0 or (pairs and number % 2 == 0) else 'L'}{x:.2f} {y:.2f}"
        for number, (x, y) in enumerate(points)
    )
