"""JSON of which every reader makes the same. Imports no torch."""

from __future__ import annotations

import json
from typing import Any

from infinipipe.data.documents import BadRecordError


def load_json(text: str) -> Any:
    """The value that JSON says.

    Raises ``json.JSONDecodeError`` as ``json.loads`` does, and ``BadRecordError`` for an object with a field twice, of which that function
    keeps the last one, and for what it is not able to read.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise BadRecordError("is nested too deeply") from None
    except (json.JSONDecodeError, BadRecordError):
        raise
    except ValueError:
        raise BadRecordError("has a number of more digits than can be read") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise BadRecordError(f"has the field {repeated!r} twice")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repetition)
