"""Colours of the pictures, one set for light and one for dark surroundings."""

from __future__ import annotations

from typing import Literal

ThemeName = Literal["light", "dark"]

THEMES: dict[str, dict[str, str]] = {
    "light": {
        "page": "#fbfbfa",
        "panel": "#ffffff",
        "text": "#1d2330",
        "muted": "#667085",
        "line": "#e2e5ea",
        "bubble": "#fbe4df",
        "bubble-edge": "#eebfb4",
        "link": "#f2b84b",
        "recompute": "#9a3f78",
        "memory": "#4f7fc4",
        "memory-fill": "#dce6f4",
        "budget": "#c8372d",
        "focus": "#111827",
        "on-chunk": "#1d2330",
        "packed": "#858d9c",
    },
    "dark": {
        "page": "#14171c",
        "panel": "#1b1f26",
        "text": "#e6e9ef",
        "muted": "#97a1b1",
        "line": "#313742",
        "bubble": "#3d2826",
        "bubble-edge": "#6b403a",
        "link": "#d99a2b",
        "recompute": "#8c2f6b",
        "memory": "#7ea9ea",
        "memory-fill": "#303d51",
        "budget": "#ff7468",
        "focus": "#ffffff",
        "on-chunk": "#14171c",
        "packed": "#858d9c",
    },
}


def css_variables(name: str) -> str:
    """The theme as CSS custom properties."""
    return " ".join(f"--{key}: {color};" for key, color in THEMES[name].items())
