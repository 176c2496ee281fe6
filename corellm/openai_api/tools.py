"""The tools of a chat request: what is checked, what the prompt says of them, and what the answer is held to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from corellm.errors import InvalidRequestError
from corellm.openai_api.kinds import boolean, check_depth, refuse, shown
from corellm.sampling_params import JsonConstraint
from corellm.text.chat_messages import BUILT_IN_TOOLS, parse_tools
from corellm.text.tool_calls import ToolCallParser

MAX_TOOLS = 128
SEPARATOR = "; "  # between the calls of one answer
TOOL_NAME = "[A-Za-z0-9_.-]{1,64}"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the answer may call. `forced` are those of which it must call one; none leaves it free."""

    definitions: Sequence[Mapping[str, Any]]
    parallel: bool
    forced: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(_name, self.definitions))

    def parser(self) -> ToolCallParser:
        """Finds the calls in one answer."""
        return ToolCallParser(self.names, parallel=self.parallel)

    def constraint(self, otherwise: JsonConstraint | None) -> JsonConstraint | None:
        """What the answer is held to: calls where it must call, else `otherwise` or a call; None leaves it free."""
        calls = [tool["function"] for tool in self.definitions if "function" in tool]
        if self.forced:
            calls, otherwise = [call for call in calls if call["name"] in self.forced], None
        elif otherwise is None:
            return None
        lenient = otherwise is not None and otherwise.lenient
        return JsonConstraint(
            _schema(calls, otherwise),
            separator=SEPARATOR if self.forced and self.parallel else "",
            lenient=lenient or not all(call.get("strict") for call in calls),
            param="tools" if otherwise is None else otherwise.param,
        )


def split_calls(text: str, tools: ToolUse) -> tuple[str | None, list[dict[str, Any]]]:
    """A whole answer as its content, None where it only calls, and its `tool_calls`."""
    parser = tools.parser()
    content: list[str] = []
    calls: list[dict[str, Any]] = []
    for piece in [*parser.push(text), *parser.finish()]:
        if isinstance(piece, str):
            content.append(piece)
        elif piece.name is not None:
            calls.append(opened_call(piece.name))
        else:
            calls[piece.index]["function"]["arguments"] += piece.arguments
    return "".join(content) if content or not calls else None, calls


def opened_call(name: str) -> dict[str, Any]:
    """A call in OpenAI's shape, its arguments still to come."""
    return {"id": f"call_{uuid4().hex}", "type": "function", "function": {"name": name, "arguments": ""}}


def finish_reason(reason: str, *, calls: int) -> str:
    """Why an answer with so many calls ended: one that was cut off is not a call to be made."""
    return "tool_calls" if calls and reason == "stop" else reason


def tools(name: str, value: Any) -> list[Mapping[str, Any]]:
    """A kind: definitions of functions, `{"type": "function", "function": {…}}`, and of built-in tools by type."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        refuse(name, value, f"a list of at most {MAX_TOOLS} tools")
    definitions = parse_tools(value)
    seen: set[str] = set()
    for index, tool in enumerate(definitions):
        called = _name(tool)
        path = f"{name}[{index}].function.name"
        if not re.fullmatch(TOOL_NAME, called):
            raise InvalidRequestError(
                f"{path} is {shown(called)}; it must be 1 to 64 letters, digits, dots, dashes or underscores", path
            )
        if called in seen:
            raise InvalidRequestError(f"{path} is {shown(called)} again; each tool needs its own name", path)
        seen.add(called)
        parameters = tool.get("function", {}).get("parameters")
        if parameters is not None:
            _check_parameters(f"{name}[{index}].function.parameters", parameters)
        if (strict := tool.get("function", {}).get("strict")) is not None:
            boolean(f"{name}[{index}].function.strict", strict)
    return definitions


def _check_parameters(path: str, parameters: Any) -> None:
    if not isinstance(parameters, dict):
        refuse(path, parameters, "a JSON schema, which is an object")
    check_depth(path, parameters)
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        refuse(f"{path}.type", kind, '"object", since a call gives its arguments by name')


def tool_choice(name: str, value: Any) -> str | tuple[str]:
    """A kind: none, auto or required, or a function's name, which becomes a tuple of it."""
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        called = function.get("name") if isinstance(function, dict) else None
        if isinstance(called, str):
            return (called,)
    if not isinstance(value, str) or value not in ("none", "auto", "required"):
        refuse(name, value, 'none, auto, required or {"type": "function", "function": {"name": "…"}}')
    return value


def tool_use(values: Mapping[str, Any]) -> ToolUse | None:
    """The tools of a chat request whose fields have been checked; None where it has none or may call none.

    Raises `InvalidRequestError`.
    """
    definitions: list[Mapping[str, Any]] = values.get("tools") or []
    choice = values.get("tool_choice", "auto")
    if not definitions:
        if choice in ("none", "auto"):
            return None
        raise InvalidRequestError(
            "tool_choice asks for a call, but there are no tools; give some, or leave it out", "tool_choice"
        )
    if choice == "none":
        return None
    functions = tuple(_name(tool) for tool in definitions if "function" in tool)
    forced = {"auto": (), "required": functions}[choice] if isinstance(choice, str) else choice
    if choice == "required" and not functions:
        raise InvalidRequestError(
            "tool_choice is required, but there are only built-in tools; give a function", "tool_choice"
        )
    if any(name not in functions for name in forced):
        raise InvalidRequestError(
            f"tool_choice names {shown(forced[0])}, which is not one of the functions in tools", "tool_choice"
        )
    parallel = values.get("parallel_tool_calls", True) and not isinstance(choice, tuple)
    return ToolUse(definitions, parallel, forced)


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["type"] if tool.get("type") in BUILT_IN_TOOLS else tool["function"]["name"])


def _schema(calls: Sequence[Mapping[str, Any]], otherwise: JsonConstraint | None) -> str:
    """One JSON schema for a call in Llama 3.1's form, or for what `otherwise` asks for."""
    alternatives = [_call_schema(call, number) for number, call in enumerate(calls)]
    if otherwise is not None:
        alternatives.append(_embedded(json.loads(otherwise.schema), len(calls)))
    numbers = range(len(alternatives))
    return json.dumps(
        {
            "anyOf": [{"$ref": f"#/$defs/{number}"} for number in numbers],
            "$defs": {str(number): alternatives[number] for number in numbers},
        }
    )


def _call_schema(function: Mapping[str, Any], number: int) -> Schema:
    parameters = function.get("parameters")
    # Without a type, JSON schema would allow any value: a call's arguments are always an object.
    held = _NO_PARAMETERS if parameters is None else {**_embedded(parameters, number), "type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": held},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _embedded(schema: Mapping[str, Any], number: int) -> Schema:
    """A schema as a part of another. Its references are to parts of itself, and an id of its own keeps them so."""
    return {**schema, "$id": f"urn:corellm:{number}"}
