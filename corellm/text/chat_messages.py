"""Conversations as the OpenAI API has them, checked once, for every prompt format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shown  # a value in an error message may be of any length
from typing import Any

from corellm.errors import InvalidRequestError

# The default of Meta's template. A fixed one keeps prompts, and so caches and resumed runs, the same from day to day.
DEFAULT_DATE = "26 Jul 2024"

ROLES = ("system", "user", "assistant", "tool", "ipython")
# Llama 3.1 was taught these: they are declared by type alone.
BUILT_IN_TOOLS = ("brave_search", "wolfram_alpha", "code_interpreter")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the assistant called, its arguments parsed."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message: `parts` are its texts in order, none where an assistant only calls tools."""

    role: str
    parts: tuple[str, ...]
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.parts)


def parse_messages(messages: object) -> list[ChatMessage]:
    """Check a conversation: a non-empty list of `{"role", "content"}`, content a string or a list of text parts.

    An assistant's `tool_calls` have their arguments as JSON text or as an object. Raises `InvalidRequestError`, whose
    `param` is the path of the offending field, such as `messages[2].content`.
    """
    entries = _array(messages, "messages")
    if not entries:
        raise _invalid("messages", messages, "a list of at least one message")
    return [_message(entry, f"messages[{index}]") for index, entry in enumerate(entries)]


def parse_tools(tools: object) -> list[Mapping[str, Any]]:
    """Check tools: functions as `{"type": "function", "function": {"name", …}}`, built-in ones by type; None is none.

    Raises `InvalidRequestError` with the path of the offending field.
    """
    parsed: list[Mapping[str, Any]] = []
    for index, entry in enumerate([] if tools is None else _array(tools, "tools")):
        path = f"tools[{index}]"
        tool = _object(entry, path)
        kind = tool.get("type", "function")
        if kind in BUILT_IN_TOOLS:
            parsed.append({"type": kind})
            continue
        if kind != "function":
            raise _invalid(f"{path}.type", kind, f"'function', or a built-in tool: {', '.join(BUILT_IN_TOOLS)}")
        _string(_object(tool.get("function"), f"{path}.function").get("name"), f"{path}.function.name")
        _check_json(tool, path)
        parsed.append(tool)
    return parsed


def check_continuation(last: ChatMessage) -> None:
    """Raise `InvalidRequestError` unless `last` is a message that the assistant can go on with."""
    if last.role != "assistant" or last.tool_calls:
        raise InvalidRequestError(
            f"continue_final_message is true, but the last message is of role {last.role!r}"
            f"{' and calls tools' if last.tool_calls else ''}; it must be an assistant's text",
            "continue_final_message",
        )


def _message(entry: object, path: str) -> ChatMessage:
    message = _object(entry, path)
    role = message.get("role")
    if role == "developer":
        role = "system"  # OpenAI's newer name for it
    if role not in ROLES:
        raise _invalid(f"{path}.role", role, f"one of {', '.join(ROLES)}, developer")
    calls_given = message.get("tool_calls")
    if calls_given and role != "assistant":
        raise _invalid(f"{path}.tool_calls", calls_given, "left out, unless the role is assistant")
    calls = [] if calls_given is None else _array(calls_given, f"{path}.tool_calls")
    tool_calls = tuple(_tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls))
    content = message.get("content")
    parts = () if content is None and tool_calls else _parts(content, f"{path}.content")
    return ChatMessage(role, parts, tool_calls)


def _parts(content: object, path: str) -> tuple[str, ...]:
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list | tuple):
        raise _invalid(path, content, "a string or a list of text parts")
    parts: list[str] = []
    for index, entry in enumerate(content):
        part = _object(entry, f"{path}[{index}]")
        if part.get("type") != "text":
            raise _invalid(f"{path}[{index}].type", part.get("type"), "'text'")
        parts.append(_string(part.get("text"), f"{path}[{index}].text"))
    return tuple(parts)


def _tool_call(entry: object, path: str) -> ToolCall:
    function = _object(_object(entry, path).get("function"), f"{path}.function")
    name = _string(function.get("name"), f"{path}.function.name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise _invalid(f"{path}.function.arguments", arguments, "a JSON object") from None
    parsed = dict(_object(arguments, f"{path}.function.arguments"))
    _check_json(parsed, f"{path}.function.arguments")
    return ToolCall(name, parsed)


def _check_json(value: object, path: str) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        raise _invalid(path, value, "a JSON value, not nested too deeply") from None


def _object(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _invalid(path, value, "an object")
    return value


def _array(value: object, path: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise _invalid(path, value, "a list")
    return value


def _string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise _invalid(path, value, "a string")
    return value


def _invalid(path: str, value: object, allowed: str) -> InvalidRequestError:
    found = "missing or null" if value is None else shown(value)
    return InvalidRequestError(f"{path} is {found}; it must be {allowed}", path)
