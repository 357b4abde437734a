"""Files by globs: each once, by its shortest name, and none by a link that leads back."""

from __future__ import annotations

import glob
import os
import string
import sysconfig
from fnmatch import fnmatch
from pathlib import Path

from infinipipe.data.documents import DataError
from infinipipe.data.settings import DataSettings


def expand(pattern: str) -> str:
    """Expand ``{stdlib}``, ``~`` and environment variables. Raises ``DataError`` for an unknown ``{name}`` or ``$NAME``."""
    pattern = pattern.replace("{stdlib}", glob.escape(sysconfig.get_paths()["stdlib"]))
    try:
        return os.path.expanduser(string.Template(pattern).substitute(os.environ))
    except KeyError as error:
        raise DataError(f"data.files uses ${error.args[0]}, but the environment has no such variable") from None
    except ValueError:
        raise DataError(f"data.files has a $ that names no variable in {pattern!r}; write $$ for a plain $") from None


def find_files(settings: DataSettings) -> list[Path]:
    """The files that ``settings`` name, sorted, each once, by its shortest name.

    Of a file of tokens with an index beside it, Megatron's .bin and .idx, the index stands for both. Raises ``DataError`` for a glob that matches nothing and for a symbolic link by which a ``**`` leads back to where it lies.
    """
    found: dict[str, str] = {}
    for pattern in settings.files:
        expanded = expand(pattern)
        matches = _matches(expanded)
        kept = [path for path in matches if not any(fnmatch(path, excluded) for excluded in settings.exclude)]
        if not kept:
            if matches:
                problem = f"all its {len(matches)} files are excluded by data.exclude"
            elif glob.has_magic(expanded):
                problem = f"no file matches (working folder {os.getcwd()})"
            elif os.path.isfile(os.path.join(expanded, "state.json")):
                problem = "it is a folder that datasets has saved; name it in data.dataset"
            elif os.path.isdir(expanded):
                problem = f"it is a folder; write {pattern.rstrip('/')}/**/* for the files in it"
            else:
                problem = f"there is no such file (working folder {os.getcwd()})"
            raise DataError(f"data.files names {pattern!r}, but {problem}")
        for path in kept:
            path = _with_index(path, settings)
            real = os.path.realpath(path)
            found[real] = min(found.get(real, path), path, key=lambda name: (len(name), name))
    return [Path(path) for path in sorted(found.values())]


def _with_index(path: str, settings: DataSettings) -> str:
    base, suffix = os.path.splitext(path)
    if (
        suffix == ".bin"
        and not settings.reader
        and settings.format in ("auto", "megatron")
        and os.path.isfile(f"{base}.idx")
    ):
        return f"{base}.idx"
    return path


def _matches(pattern: str) -> list[str]:
    """The files that a pattern matches. Raises ``DataError`` at a cycle of symbolic links, which ``**`` would follow for ever."""
    reached: dict[str, frozenset[str]] = {}

    def real_parents(folder: str) -> frozenset[str]:
        if folder not in reached:
            parent = os.path.dirname(folder)
            above = real_parents(parent) if parent != folder else frozenset()
            real = os.path.realpath(folder)
            if real in above and os.path.islink(folder):
                raise DataError(
                    f"data.files names {pattern!r}, which follows the symbolic link {folder} back to {real}; remove the link "
                    "or name the files without it"
                )
            reached[folder] = above | {real}
        return reached[folder]

    parts = pattern.split(os.sep)
    for index, part in enumerate(parts):
        if part == "**":
            for folder in glob.iglob(os.sep.join(parts[: index + 1]) + os.sep, recursive=True):
                real_parents(os.path.dirname(folder))
    return [path for path in glob.iglob(pattern, recursive=True) if os.path.isfile(path)]
