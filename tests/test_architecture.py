"""The layer picture of docs/architecture.md holds: imports run downward, and planning needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import infinipipe

PACKAGE = Path(infinipipe.__file__).parent
LAYERS = (
    ("plan",),
    ("timeline",),
    ("cost",),
    ("simulate",),
    ("planner",),
    ("data",),
    ("model",),
    ("runtime",),
    ("verify",),
    ("profile", "rehearse"),
    ("train",),
    ("cli",),
)
WITHOUT_TORCH = ("plan", "cost", "simulate", "timeline", "planner", "data")
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}


def imports_of(path: Path) -> set[str]:
    """Layers of the package that a module imports, at its top or within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "infinipipe":
                names = [f"infinipipe.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("infinipipe.")}
    return found


@pytest.mark.parametrize("layer", sorted(HEIGHT))
def test_imports_run_downward(layer: str) -> None:
    for path in (PACKAGE / layer).rglob("*.py"):
        for other in imports_of(path) - {layer, "files", "settings"}:
            assert HEIGHT[other] < HEIGHT[layer], f"{path.relative_to(PACKAGE)} imports {other}"


def test_every_package_is_a_layer() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert packages == set(HEIGHT)


def test_planning_starts_without_torch() -> None:
    code = "import sys\n" + "".join(f"import infinipipe.{layer}\n" for layer in WITHOUT_TORCH)
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_picture_names_every_layer() -> None:
    picture = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text().split("```")[1]
    for layer in HEIGHT:
        assert any(line.startswith(layer) or f"   {layer} " in line for line in picture.splitlines()), layer
