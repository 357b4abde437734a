"""What the documents name is there: links, modules and classes, files, settings; and the glossary gives everything one meaning."""

from __future__ import annotations

import dataclasses
import importlib
import re
import typing
from collections import Counter
from pathlib import Path

import pytest

import infinipipe
from infinipipe.plan import KINDS
from infinipipe.train.settings import Settings

from .documents import DOCUMENTS, ROOT, blocks, prose

PACKAGE = Path(infinipipe.__file__).parent
GLOSSARY = ROOT / "docs" / "glossary.md"
SECTIONS = typing.get_type_hints(Settings)
SETTINGS = {f"{section}.{field.name}" for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)}
SUFFIXES = (".json", ".py", ".toml", ".yaml", ".html")
COLUMNS = 5
"""Of the glossary: term, meaning, symbol in the paper, the field's word, where in the package."""


def anchors(document: Path) -> set[str]:
    """What links to a heading of a document end in, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def spans(document: Path) -> list[str]:
    """The pieces of code in a document's running text."""
    return re.findall(r"`([^`\n]+)`", prose(document))


def is_there(name: str) -> bool:
    """Whether a dotted name in the package is that of a module, of something in one, or of a field or method of a class."""
    first, *rest = name.split(".")
    found: typing.Any = infinipipe
    path = "infinipipe"
    for part in (first, *rest):
        path = f"{path}.{part}"
        if dataclasses.is_dataclass(found) and part in found.__dataclass_fields__:
            return True
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        if part in getattr(found, "__annotations__", {}):
            return True
        try:
            found = importlib.import_module(path)
        except ImportError:
            return False
    return True


def rows() -> list[list[str]]:
    """The rows of the glossary's tables."""
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if not set("".join(row)) <= set("-: ") and row[0] != "term"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=[document.stem for document in DOCUMENTS])
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=[document.stem for document in DOCUMENTS])
def test_modules_files_and_settings_that_are_named_exist(document: Path) -> None:
    shown = {block.file for block in blocks(document)}
    for span in spans(document):
        first = re.split(r"[./]", span)[0]
        if match := re.fullmatch(r"infinipipe\.([\w.]+)", span):
            assert is_there(match[1]), f"{document.name} names {span}"
        elif re.fullmatch(r"[\w/.]+\.py|\w+/[\w/.]+", span) and span not in shown:
            roots = [root for root in (ROOT, PACKAGE) if (root / first).exists()]
            assert not roots or any((root / span).exists() for root in roots), f"{document.name} names {span}"
        elif re.fullmatch(r"\w+\.\w+", span) and first in SECTIONS and not span.endswith(SUFFIXES):
            assert span in SETTINGS or is_there(span), f"{document.name} names {span}"


def test_the_table_of_kinds_is_that_of_the_package() -> None:
    shown = re.findall(
        r"^\| `(\w)` \| (.*?) \|.*\| `(\w+)` \|$", (ROOT / "docs" / "extending.md").read_text(), re.MULTILINE
    )
    assert shown == [(kind.value, row.name, row.cost) for kind, row in KINDS.items()]


def test_what_the_glossary_names_exists() -> None:
    for row in rows():
        assert len(row) == COLUMNS, row
        named = re.findall(r"`([^`]+)`", row[-1])
        assert named or row[-1] == "", row
        for name in named:
            assert is_there(name), f"{row[0]}: {name}"


def test_the_glossary_gives_everything_one_meaning() -> None:
    terms = Counter(term.strip() for row in rows() for term in row[0].split(","))
    names = Counter(name for row in rows() for name in re.findall(r"`([^`]+)`", row[-1]))
    for counted in (terms, names):
        assert len(counted) > 20
        assert not {name: count for name, count in counted.items() if count > 1}
