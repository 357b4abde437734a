"""Functions of a user's own, from Python files: ``path/to/file.py:function`` names a schedule, a planner or a cost model."""

from __future__ import annotations

import functools
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from infinipipe.plan.types import PlanError


def is_reference(name: str) -> bool:
    """Whether a name is of the form ``path/to/file.py:function``."""
    return name.rpartition(":")[0].endswith(".py")


def load_function(reference: str, what: str) -> Callable[..., Any]:
    """The function that ``path/to/file.py:function`` names; ``what`` it is, such as ``schedule``, is for errors.

    The file is run when it is first asked for, and again once it has changed. Raises ``PlanError`` if there is no such file, if it
    fails, or has no such function. Whatever else the function raises when it is called becomes a ``PlanError`` that names it.
    """
    path, _, name = reference.rpartition(":")
    file = Path(path)
    if not file.is_file() or file.suffix != ".py":
        why = "its name must end in .py" if file.is_file() else f"there is no such file (working folder {Path.cwd()})"
        raise PlanError(f"cannot load the {what} file {path!r}; {why}")
    module = _run(str(file.resolve()), file.stat().st_mtime_ns, f"{what} file {path!r}")
    if not hasattr(module, name):
        raise PlanError(f"the {what} file {path!r} has no function {name!r}")
    function = getattr(module, name)
    if not callable(function):
        raise PlanError(f"{name!r} in the {what} file {path!r} is of type {type(function).__name__}, not a function")

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except PlanError:
            raise
        except Exception as error:
            raise PlanError(f"the {what} {reference} fails{_in_words(error, module.__file__)}") from error

    return guarded


@functools.lru_cache(maxsize=64)
def _run(path: str, changed_at: int, described: str) -> ModuleType:
    """The module that a file makes, one for every ``changed_at``. Raises ``PlanError``."""
    # Dataclasses look up the module in which they are made: it has a name that no other has.
    spec = importlib.util.spec_from_file_location(path, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path]
        raise PlanError(f"the {described} fails when loaded{_in_words(error, path)}") from error
    return module


def _in_words(error: Exception, path: str | None) -> str:
    """At which line of the file, if in it, and what, on one line."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        return f" at line {error.lineno}: SyntaxError: {error.msg}"
    what = " ".join(str(error).split())
    return (f" at line {lines[-1]}" if lines else "") + f": {type(error).__name__}: {what}"
