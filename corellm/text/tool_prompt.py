"""How a prompt says which tools there are, and which were called: in Llama 3.1's words, which any model can read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from corellm.errors import InvalidRequestError
from corellm.text.chat_messages import ChatMessage, ToolCall

_INTRODUCTION = (
    "Given the following functions, please respond with a JSON for a function call "
    "with its proper arguments that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)


def describe_functions(conversation: list[ChatMessage], functions: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """The conversation with `functions` described at the head of its first user message.

    Raises `InvalidRequestError` when there is none.
    """
    if not functions:
        return conversation
    first = next((index for index, message in enumerate(conversation) if message.role == "user"), None)
    if first is None:
        raise InvalidRequestError("tools are described in the first user message; add a message of role user", "tools")
    definitions = "".join(json.dumps(function, ensure_ascii=False, indent=4) + "\n\n" for function in functions)
    described = ChatMessage("user", prefixed(_INTRODUCTION + definitions, conversation[first].parts))
    return [*conversation[:first], described, *conversation[first + 1 :]]


def prefixed(prefix: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    """`parts` with `prefix` before the first."""
    return (prefix + "".join(parts[:1]), *parts[1:])


def call_text(call: ToolCall) -> str:
    """A call of a function as the assistant writes it."""
    return json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False)


def built_in_call_text(call: ToolCall) -> str:
    """A call of a built-in tool, as it stands behind `<|python_tag|>`.

    Raises `InvalidRequestError` unless its one argument is there, a string.
    """
    name = "code" if call.name == "code_interpreter" else "query"
    argument = call.arguments.get(name)
    if not isinstance(argument, str) or len(call.arguments) != 1:
        raise InvalidRequestError(
            f"messages call {call.name} with {', '.join(call.arguments) or 'nothing'}; it takes one string, {name}",
            "messages",
        )
    return argument if name == "code" else f'{call.name}.call(query="{argument}")'
