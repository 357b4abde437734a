"""How a record of a file becomes a document, or what is wrong with it."""

from __future__ import annotations

import math
from typing import Any

from infinipipe.data.chats import CHAT_FIELDS, chat_of
from infinipipe.data.documents import BadRecordError, Document
from infinipipe.data.settings import LEAST_WEIGHT, MOST_WEIGHT, DataSettings
from infinipipe.data.strict import load_json


def document_of(record: Any, name: str, settings: DataSettings) -> Document:
    """The document that a record holds. Raises ``BadRecordError`` if it holds none."""
    if not isinstance(record, dict):
        raise BadRecordError("is not a JSON object")
    weight = _weight(record, settings.weight_field)
    prompt, completion = record.get(settings.prompt_field), record.get(settings.completion_field)
    if isinstance(record.get(settings.text_field), str):
        return Document(name, _text(record, settings.text_field), weight=weight)
    if prompt is not None and completion is not None:
        are_chats = isinstance(prompt, list) and isinstance(completion, list)
        if not are_chats:
            prompt, completion = _text(record, settings.prompt_field), _text(record, settings.completion_field)
        if not are_chats and not (settings.prompts_as_chats and completion):
            return Document(name, completion, prompt, weight=weight)
        return _prompted_chat(record, name, prompt, completion, weight)
    for field in (settings.messages_field, "conversations"):
        if record.get(field) is not None:
            return _chat(record, name, field, weight)
    if settings.text_field in record:
        raise BadRecordError(f"has a field {settings.text_field!r} that is not a text")
    raise BadRecordError(f"has {missing_fields(settings)}")


def is_ambiguous(record: dict[str, Any], settings: DataSettings) -> bool:
    """Whether a record holds more than one of what :func:`document_of` looks for in turn."""
    is_prompted = record.get(settings.prompt_field) is not None and record.get(settings.completion_field) is not None
    is_chat = any(record.get(field) is not None for field in (settings.messages_field, "conversations"))
    return isinstance(record.get(settings.text_field), str) + is_prompted + is_chat > 1


def missing_fields(settings: DataSettings) -> str:
    """What a record without any document lacks, in words."""
    return (
        f"neither the field {settings.text_field!r} (data.text_field) nor both {settings.prompt_field!r} and "
        f"{settings.completion_field!r} (data.prompt_field, data.completion_field) nor a chat in "
        f"{settings.messages_field!r} (data.messages_field)"
    )


def wanted_fields(settings: DataSettings) -> list[str]:
    """All fields that a document may come from."""
    own = [settings.text_field, settings.prompt_field, settings.completion_field, settings.messages_field]
    return [*own, *([settings.weight_field] if settings.weight_field else []), "conversations", *CHAT_FIELDS]


def _prompted_chat(record: dict[str, Any], name: str, prompt: Any, completion: Any, weight: float) -> Document:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
        completion = [{"role": "assistant", "content": completion}]
    chat = chat_of(record, [*prompt, *completion], first=len(prompt))
    return Document(name, weight=weight, chat=chat)


def _chat(record: dict[str, Any], name: str, field: str, weight: float) -> Document:
    messages = record[field]
    if isinstance(messages, str):
        try:
            messages = load_json(messages)
        except BadRecordError as error:
            raise BadRecordError(f"has a field {field!r} that {error}") from None
        except ValueError:
            messages = None
    if not isinstance(messages, list) or not messages:
        raise BadRecordError(f"has a field {field!r} that is not a list of messages")
    return Document(name, weight=weight, chat=chat_of(record, messages))


def _weight(record: dict[str, Any], field: str) -> float:
    if not field:
        return 1.0
    value = record.get(field)
    if value is None:
        raise BadRecordError(f"has no field {field!r} (data.weight_field)")
    try:
        weight = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if weight != 0 and not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise BadRecordError(
            f"has a weight {value!r} in {field!r} (data.weight_field) that is neither 0 nor a number from {LEAST_WEIGHT:g} to "
            f"{MOST_WEIGHT:g}"
        )
    return weight


def _text(record: dict[str, Any], field: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        raise BadRecordError(f"has a field {field!r} that is not a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecordError(f"has a field {field!r} with an unpaired surrogate") from None
    return value
