"""Writes the table of families in docs/compatibility.md from what ``checkpoints.py --record docs/compatibility.json`` saw.

``python benchmarks/compatibility.py``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
DOCUMENT, RECORD = DOCS / "compatibility.md", DOCS / "compatibility.json"
BEGIN, END = "<!-- families: written by benchmarks/compatibility.py -->", "<!-- families: end -->"
_COLUMNS = ("family", "trains as", "loaded, first loss equal", "exported", "read by transformers 4", "exact", "planned")


def table(record: dict[str, Any]) -> str:
    """The families as Markdown, one a row."""
    layouts = record["layouts"]
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    for name, seen in record["families"].items():
        cells = [_of(seen[key], layouts) for key in ("layouts", "exported", "version4")]
        cells += ["yes" if seen[key] else "no" for key in ("exact", "planned")]
        lines.append(f"| {name} | `{seen['model_type']}` | {' | '.join(cells)} |")
    lines += ["", f"Layouts: {'; '.join(layouts)} (stages x sequence-parallel processes)."]
    return "\n".join(lines)


def _of(found: list[str], layouts: list[str]) -> str:
    if found == layouts:
        return "all layouts"
    return ", ".join(found) or "no"


def render(document: str, record: dict[str, Any]) -> str:
    """The document with the table in its place."""
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(record)}\n\n{END}{rest.split(END)[1]}"


def main() -> int:
    DOCUMENT.write_text(render(DOCUMENT.read_text(), json.loads(RECORD.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
