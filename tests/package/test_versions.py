"""The versions that pyproject.toml allows are the tested ones: all its lower bounds together, and a set of recent ones."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
OLDEST = ROOT / "constraints-oldest.txt"
RECENT = ROOT / "constraints.txt"
FOR_ACCELERATORS = ("cuda-", "nvidia-", "triton")
"""How the names of packages begin that torch's build for CUDA needs, in versions which that build fixes itself."""


def pins(path: Path) -> dict[str, Version]:
    """Name and version of every line of a constraints file."""
    found: dict[str, Version] = {}
    for line in path.read_text().splitlines():
        match = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
        assert match, f"{path.name}: {line!r} is not NAME==VERSION"
        name = canonicalize_name(match[1])
        assert name not in found, f"{path.name} names {name} twice"
        found[name] = Version(match[2])
    return found


def requirements() -> list[Requirement]:
    """All packages that pyproject.toml asks for: to build, to run, and for every extra."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    lists = [document["build-system"]["requires"], project["dependencies"], *project["optional-dependencies"].values()]
    every = [Requirement(text) for texts in lists for text in texts]
    return [requirement for requirement in every if requirement.name != project["name"]]


def installed(requirement: Requirement) -> set[str]:
    """Names of all packages that a requirement brings into this environment, itself not among them."""
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = [requirement]
    while queue:
        outer = queue.pop()
        for inner in map(Requirement, requires(outer.name) or []):
            applies = inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in ("", *outer.extras))
            key = (canonicalize_name(inner.name), frozenset(inner.extras))
            if applies and key not in seen:
                seen.add(key)
                queue.append(inner)
    return {name for name, _ in seen if not name.startswith(FOR_ACCELERATORS)} - {requirement.name}


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_every_bound_is_the_oldest_tested_version(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    bounds = list(requirement.specifier)
    assert [bound.operator for bound in bounds] == [">="], f"{requirement} must have a lower bound and no other"
    assert Version(bounds[0].version) == pins(OLDEST)[name]
    assert requirement.specifier.contains(pins(RECENT)[name])


def test_the_versions_of_this_environment_are_all_written_down() -> None:
    here = {name: Version(Version(version(name)).public) for name in installed(Requirement("infinipipe[dev]"))}
    unlike = [{name for name in here if pins(path).get(name) != here[name]} for path in (OLDEST, RECENT)]
    assert not min(unlike, key=len), "installed in versions that neither constraints file has"
