"""Chats: from the forms in which records hold them to messages, and by the chat template to text with learnt spans.

Imports no torch: the template is rendered by a module of transformers that needs none.
"""

from __future__ import annotations

import dataclasses
import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from infinipipe.data.documents import BadRecordError, Chat, DataError
from infinipipe.data.settings import RESERVED
from infinipipe.data.strict import load_json

CHAT_FIELDS = ("tools", "system", "chat_template_kwargs")
"""Fields of a record beside its messages that its chat is made of."""
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
"""Roles of transformers by the ``from`` of a ShareGPT message."""
SPELLED, SPELLED_END = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode that stand around a special token that a message spells, while the template is rendered."""
_MARKED = re.compile(f"{SPELLED}([^{SPELLED}{SPELLED_END}]*){SPELLED_END}|[{SPELLED}{SPELLED_END}]")
OTHER_NAME = "a_name_that_no_chat_holds_6d1f"
"""Stands for the names of tools to see whether the template shows them."""
_WORD = re.compile(r"\w+")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]


def chat_of(record: dict[str, Any], messages: list[Any], *, first: int = 0) -> Chat:
    """The chat of a record; messages before ``first`` are only read. Raises ``BadRecordError``."""
    tools = record.get("tools") or None
    if isinstance(tools, str):
        tools = _json(tools, "a field 'tools' that is not JSON") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRecordError("has a field 'tools' that is not a list of JSON schemas")
    options = record.get("chat_template_kwargs") or {}
    if isinstance(options, str):
        options = _json(options, "a field 'chat_template_kwargs' that is not JSON")
    if not isinstance(options, dict):
        raise BadRecordError("has a field 'chat_template_kwargs' that is not a JSON object")
    for name in options:
        if name in RESERVED:
            raise BadRecordError(
                f"has {name!r} in 'chat_template_kwargs', which is none of the template's own variables"
            )
    given = [_message(message, number) for number, message in enumerate(messages, 1)]
    learnable = [index >= first and _is_learnable(message, index + 1) for index, message in enumerate(given)]
    system = record.get("system")
    if system:
        if not isinstance(system, str):
            raise BadRecordError("has a field 'system' that is not a text")
        if given[0]["role"] == "system":
            raise BadRecordError("has both a field 'system' and a message of that role")
        given.insert(0, {"role": "system", "content": system})
        learnable.insert(0, False)
    _require_text([given, tools, options])
    return Chat(given, tools, options, tuple(learnable))


def _json(text: str, problem: str) -> Any:
    try:
        return load_json(text)
    except ValueError as error:
        doubt = f" ({error})" if isinstance(error, BadRecordError) else ""
        raise BadRecordError(f"has {problem}{doubt}") from None


def _message(message: Any, number: int) -> dict[str, Any]:
    """A message in the form of transformers, without the keys that have no value."""
    if not isinstance(message, dict):
        raise BadRecordError(f"has a message {number} that is not a JSON object")
    given = {key: value for key, value in message.items() if value is not None}
    if "from" in given and "role" not in given:
        given = _from_sharegpt(given, number)
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise BadRecordError(f"has a message {number} without a role")
    if "content" in given:
        given["content"] = _content(given["content"], number)
    elif not given.get("tool_calls"):
        raise BadRecordError(f"has a message {number} without content")
    if given.get("tool_calls"):
        if not isinstance(given["tool_calls"], list):
            raise BadRecordError(f"has a message {number} whose tool_calls are not a list")
        given["tool_calls"] = [_tool_call(call, number) for call in given["tool_calls"]]
    return given


def _from_sharegpt(message: dict[str, Any], number: int) -> dict[str, Any]:
    said, value = message["from"], message.get("value")
    if not isinstance(said, str) or said not in ROLES:
        raise BadRecordError(f"has a message {number} from {said!r}; known are {', '.join(ROLES)}")
    rest = {key: kept for key, kept in message.items() if key not in ("from", "value")}
    if said != "function_call":
        return {**rest, "role": ROLES[said], "content": value if value is not None else ""}
    call = _json(value, f"a function call in message {number} that is not JSON") if isinstance(value, str) else value
    calls = call if isinstance(call, list) else [call]
    return {**rest, "role": "assistant", "tool_calls": [{"type": "function", "function": one} for one in calls]}


def _content(content: Any, number: int) -> str:
    """Text, or the text of all parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise BadRecordError(f"has a message {number} whose content is not a text")
    for part in content:
        if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise BadRecordError(
                f"has a message {number} with a part of type {part.get('type')!r}; only text is trained on"
            )
    return "".join(part["text"] for part in content)


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """A call whose arguments are an object, as templates expect; APIs write them as JSON in a text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRecordError(f"has a tool call without a function's name in message {number}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}", f"a tool call in message {number} whose arguments are not JSON")
    if not isinstance(arguments, dict):
        raise BadRecordError(f"has a tool call in message {number} whose arguments are not a JSON object")
    own = {key: value for key, value in call.items() if value is not None and key not in ("name", "arguments")}
    return {"type": "function", **own, "function": {**function, "arguments": arguments}}


def _is_learnable(message: dict[str, Any], number: int) -> bool:
    """Whether a message is an assistant's that is not taken out by its own mark, which is removed."""
    learnt = message["role"] == "assistant"
    for mark in ("weight", "loss", "train"):
        if mark not in message:
            continue
        value = message.pop(mark)
        if value not in (0, 1):
            raise BadRecordError(f"has a message {number} whose {mark} is {value!r}; it must be 0 or 1")
        if value and message["role"] != "assistant":
            raise BadRecordError(
                f"has a message {number} of role {message['role']!r} to learn; only an assistant's are"
            )
        learnt = learnt and bool(value)
    return learnt


def _require_text(value: Any) -> None:
    """Raise ``BadRecordError`` for strings that cannot be UTF-8, or that hold the marks that this module sets."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise BadRecordError("has a message with an unpaired surrogate") from None
        if SPELLED in value or SPELLED_END in value:
            raise BadRecordError("has a message with a noncharacter, U+FDD0 or U+FDD1")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _require_text(key)
            _require_text(inner)
    elif isinstance(value, list):
        for inner in value:
            _require_text(inner)


@dataclass(frozen=True)
class RenderedChat:
    """What the template makes of a chat.

    Attributes:
        text: the whole.
        learnt: spans of characters that are learnt, in order.
        spelled: spans of characters in which messages spell a special token.
        has_unused_fields: whether messages have fields that the template does not name.
    """

    text: str
    learnt: tuple[Span, ...]
    spelled: tuple[Span, ...]
    has_unused_fields: bool = False


class ChatTemplate:
    """Renders chats by a Jinja template of Hugging Face form.

    Args:
        template: the template, or several by name, of which ``tool_use`` is for chats with tools and ``default`` for others.
        values: what the template may use beside the messages, such as ``bos_token``.
        loss_on: which turns are learnt.
        special: matches the special tokens that messages may spell.
    """

    def __init__(
        self,
        template: str | dict[str, str],
        values: dict[str, Any],
        *,
        loss_on: Literal["assistant", "last", "all"] = "assistant",
        special: re.Pattern[str],
    ) -> None:
        self._template, self._values, self._loss_on, self._special = template, values, loss_on, special

    def render(self, chat: Chat) -> RenderedChat:
        """The chat as text with its learnt spans.

        Raises ``BadRecordError`` where the template cannot tell them, or leaves out what is said, tools or their calls.
        """
        messages, tools, options = (_mark(part, self._special) for part in (chat.messages, chat.tools, chat.options))
        chat = Chat(messages, tools, options, chat.learnable)
        marked, spans = self._learnt(chat)
        _require_shown(messages, marked)
        self._require_tools(chat)
        named = _words(self._chosen(chat))
        has_unused = any(message.keys() - named for message in messages)
        return dataclasses.replace(_unmarked(marked, spans), has_unused_fields=has_unused)

    def _learnt(self, chat: Chat) -> tuple[str, list[Span]]:
        turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        wanted = [index for index in turns if chat.learnable[index]]
        has_marks = _GENERATION.search(self._chosen(chat)) is not None
        text, marks = self._text(chat, len(chat.messages), prompt=False, marks=has_marks)
        if self._loss_on == "all":
            return text, [(0, len(text))]
        if not turns:
            raise BadRecordError("has no message of an assistant to learn from")
        if self._loss_on == "last":
            wanted = [index for index in wanted if index == turns[-1]]
        if not has_marks:
            return text, [self._turn(chat, index, text) for index in wanted]
        if not marks:
            raise BadRecordError(
                "has assistant messages, but the chat template's generation marks are around none of them"
            )
        if wanted == turns:
            return text, marks
        if len(marks) == len(turns):
            return text, [marks[turns.index(index)] for index in wanted]
        own = [self._turn(chat, index, text) for index in wanted]
        return text, [(max(a, c), min(b, d)) for a, b in own for c, d in marks if max(a, c) < min(b, d)]

    def _turn(self, chat: Chat, index: int, text: str) -> Span:
        """Where a message stands in ``text``: from the end of what asks for it to the end of the chat that ends with it."""
        before, _ = self._text(chat, index, prompt=True)
        until, _ = self._text(chat, index + 1, prompt=False)
        if not (text.startswith(until) and until.startswith(before)):
            raise BadRecordError(
                f"cannot be divided into turns: with the chat template, the chat up to message {index + 1} does not begin "
                "the whole chat; set data.loss_on to last or all, or give a tokenizer.chat_template with "
                "{% generation %} marks"
            )
        if len(before) == len(until):
            raise BadRecordError(f"has a message {index + 1} of which the chat template makes no text to learn")
        return len(before), len(until)

    def _require_tools(self, chat: Chat) -> None:
        """Raise ``BadRecordError`` if the template leaves out tools, or calls of them."""
        tools = [_renamed(tool) for tool in chat.tools or ()]
        if tools:
            self._require_names(dataclasses.replace(chat, tools=tools), len(tools), "tools")
        count = sum(len(message.get("tool_calls") or ()) for message in chat.messages)
        if count:
            messages = [
                message | {"tool_calls": [_renamed(call) for call in message["tool_calls"]]}
                if message.get("tool_calls")
                else message
                for message in chat.messages
            ]
            self._require_names(dataclasses.replace(chat, messages=messages), count, "calls of tools")

    def _require_names(self, chat: Chat, count: int, what: str) -> None:
        text, _ = self._text(chat, len(chat.messages), prompt=False)
        if text.count(OTHER_NAME) < count:
            raise BadRecordError(
                f"has {what} that the chat template leaves out; name one that shows them in tokenizer.chat_template"
            )

    def _chosen(self, chat: Chat) -> str:
        if isinstance(self._template, str):
            return self._template
        name = "tool_use" if chat.tools and "tool_use" in self._template else "default"
        if name not in self._template:
            raise BadRecordError(
                f"needs a chat template named {name!r}, but the tokenizer has {', '.join(self._template)}"
            )
        return self._template[name]

    def _text(self, chat: Chat, count: int, *, prompt: bool, marks: bool = False) -> tuple[str, list[Span]]:
        """The first ``count`` messages, with what asks for the next one if ``prompt``, and the template's own marks."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[chat.messages[:count]],
                tools=chat.tools,
                chat_template=self._chosen(chat),
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **(self._values | chat.options),
            )
        except TemplateSyntaxError as error:
            raise DataError(f"the chat template is malformed at line {error.lineno}: {error.message}") from None
        except Exception as error:  # a template may raise whatever its expressions do
            raise BadRecordError(f"cannot be rendered by the chat template ({' '.join(str(error).split())})") from None
        return texts[0], [tuple(span) for span in spans[0]] if marks else []


@lru_cache
def _words(template: str) -> frozenset[str]:
    return frozenset(_WORD.findall(template))


def _require_shown(messages: Sequence[dict[str, Any]], text: str) -> None:
    """Raise ``BadRecordError`` if the template has left out of ``text`` what others than the assistant say.

    What an assistant says is not looked for: some templates leave out what it thought before earlier answers.
    """
    for message in messages:
        said = message.get("content", "").strip()
        # What tools answer is written as JSON by some templates.
        shown = said in text or (message["role"] == "tool" and json.dumps(said, ensure_ascii=False)[1:-1] in text)
        if message["role"] != "assistant" and not shown:
            raise BadRecordError(
                f"has a message of role {message['role']!r} that the chat template leaves out; name one that shows it in "
                "tokenizer.chat_template"
            )


def _renamed(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool, or a call of one, by another name."""
    function = tool.get("function")
    return (
        {**tool, "function": {**function, "name": OTHER_NAME}}
        if isinstance(function, dict)
        else {**tool, "name": OTHER_NAME}
    )


def _mark(value: Any, special: re.Pattern[str]) -> Any:
    """``value`` with marks around what ``special`` matches in its strings."""
    if isinstance(value, str):
        return special.sub(f"{SPELLED}\\g<0>{SPELLED_END}", value)
    if isinstance(value, dict):
        return {key: _mark(inner, special) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mark(inner, special) for inner in value]
    return value


def _unmarked(marked: str, spans: Sequence[Span]) -> RenderedChat:
    """The text without the marks of this module; what they were around, and ``spans``, in its characters."""
    found = (
        [position for position, character in enumerate(marked) if character in (SPELLED, SPELLED_END)]
        if (SPELLED in marked or SPELLED_END in marked)
        else []
    )

    def place(position: int) -> int:
        return position - bisect_left(found, position)

    spelled = [(place(match.start(1)), place(match.end(1))) for match in _MARKED.finditer(marked) if match[1]]
    learnt = [(place(start), place(end)) for start, end in spans if start < end]
    text = marked.replace(SPELLED, "").replace(SPELLED_END, "") if found else marked
    return RenderedChat(text, tuple(learnt), tuple(spelled))
