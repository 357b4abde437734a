"""The documents, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(r"^```(\w*) ?(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\S+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document.

    Attributes:
        language: as the fence names it; empty if it does not.
        file: what the block is the content of, by a comment in its first line or after the language, if anything.
        text: its lines.
        line: number of the first of these in the document.
    """

    language: str
    file: str
    text: str
    line: int

    @property
    def commands(self) -> list[str]:
        """The lines of an ``sh`` block, continued ones joined."""
        lines = self.text.replace("\\\n", " ").splitlines() if self.language == "sh" else []
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def blocks(document: Path) -> list[Block]:
    """All fenced blocks, in order."""
    text, found = document.read_text(), []
    for match in _BLOCK.finditer(text):
        language, name, content = match.groups()
        comment = _FILE.match(content)
        file = name or (comment[1] if comment else "")
        found.append(Block(language, file, content, text.count("\n", 0, match.start(3)) + 1))
    return found


def prose(document: Path) -> str:
    """A document without its blocks."""
    return _BLOCK.sub("", document.read_text())
