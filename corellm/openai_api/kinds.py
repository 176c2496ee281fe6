"""The kinds of values that OpenAI request fields hold: each is a function that checks a JSON value and converts it.

A kind takes the field's name and its value (never null: null means default) and raises `InvalidRequestError`, naming
the field, when the value is of the wrong type or out of range.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from corellm.errors import InvalidRequestError
from corellm.sampling_params import MAX_STOP_STRINGS, JsonConstraint

Kind = Callable[[str, Any], Any]

MAX_INT32 = 2**31 - 1
MAX_SCHEMA_DEPTH = 100  # llguidance reads no more than 128
MAX_SHOWN = 80  # characters of a refused value in a message
MAX_SHOWN_BITS = 256  # of an integer: Python refuses to print huge ones


def shown(value: Any) -> str:
    """The value as JSON writes it, for a message on one line; cut when it is long."""
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | dict):
        kind = "a list" if isinstance(value, list) else "an object"
        return (
            f"{kind} with {len(value)} {'entry' if len(value) == 1 else 'entries'}"
            if value
            else f"an empty {kind.split()[1]}"
        )
    text = json.dumps(value[: MAX_SHOWN + 1] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise InvalidRequestError(f"{name} is {shown(value)}; it must be {allowed}", name)


def is_integer(value: Any) -> bool:
    """Whether a JSON value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        refuse(name, value, "a string")
    return value


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        refuse(name, value, "true or false")
    return value


def integer(low: int, high: int) -> Kind:
    def check(name: str, value: Any) -> int:
        if not is_integer(value) or not low <= value <= high:
            refuse(name, value, f"an integer from {low} to {high}")
        return int(value)

    return check


def number(name: str, value: Any) -> float:
    """A finite number; its range is `SamplingParams`' to check."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_INT32 <= value <= MAX_INT32:
        refuse(name, value, "a number")
    return value


def anything(name: str, value: Any) -> Any:
    """For fields that have no effect."""
    return value


def unsupported(*harmless: Any) -> Kind:
    """A field of OpenAI's whose function CoreLLM lacks: refused unless its value asks for nothing."""

    def check(name: str, value: Any) -> None:
        if not any(type(value) is type(known) and value == known for known in harmless):
            raise InvalidRequestError(f"{name} is not supported here; leave it out of the request", name)

    return check


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(entry, str) and entry for entry in strings):
        refuse(name, value, f"a non-empty string or a list of at most {MAX_STOP_STRINGS} of them")
    return tuple(strings)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(is_integer(entry) and 0 <= entry <= MAX_INT32 for entry in value):
        refuse(name, value, "a list of token ids")
    return tuple(value)


def logit_bias(name: str, value: Any) -> dict[int, float]:
    """JSON's keys are strings of token ids."""
    if not isinstance(value, dict):
        refuse(name, value, 'an object such as {"1234": -100}')
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequestError(f"{name} has the key {shown(key)}; keys must be token ids", name)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not math.fabs(bias) <= 100:
            raise InvalidRequestError(f"{name} of {key} is {shown(bias)}; it must be a number from -100 to 100", name)
        biases[int(key)] = bias
    return biases


def prompts(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists: always returned as several prompts."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(entry, str) for entry in value):
            return tuple(value)
        if is_integer(value[0]):
            return (token_ids(name, value),)
        if all(isinstance(entry, list) and entry for entry in value):
            return tuple(token_ids(name, entry) for entry in value)
    refuse(name, value, "a string, a list of strings, a list of token ids or a list of lists of them, not empty")


def conversation(name: str, value: Any) -> list[dict[str, Any]]:
    """A non-empty list of objects; what each may hold is the prompt format's to check."""
    if not isinstance(value, list) or not value:
        refuse(name, value, "a non-empty list of messages")
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            refuse(f"{name}[{index}]", message, 'an object such as {"role": "user", "content": "…"}')
    return value


def response_format(name: str, value: Any) -> JsonConstraint | None:
    """None for text; else what the answer is held to."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonConstraint('{"type": "object"}', param=name)
    if kind != "json_schema":
        refuse(f"{name}.type" if isinstance(value, dict) else name, kind or value, "text, json_object or json_schema")
    wanted = value.get("json_schema")
    schema = wanted.get("schema") if isinstance(wanted, dict) else None
    if not isinstance(schema, dict):
        refuse(f"{name}.json_schema.schema", schema, "a JSON schema, which is an object")
    strict = wanted.get("strict")
    if strict is not None:
        boolean(f"{name}.json_schema.strict", strict)
    check_depth(name, schema)
    return JsonConstraint(json.dumps(schema), lenient=not strict, param=name)


def check_depth(name: str, schema: Any) -> None:
    """Refuse a JSON value that is nested deeper than any schema that can be used."""
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidRequestError(f"{name} is nested more than {MAX_SCHEMA_DEPTH} deep; make it flatter", name)
        inner = [
            entry.values() if isinstance(entry, dict) else entry for entry in level if isinstance(entry, dict | list)
        ]
        level = [entry for entries in inner for entry in entries]


def stream_options(name: str, value: Any) -> dict[str, Any]:
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    if not isinstance(value, dict):
        refuse(name, value, f"an object with any of {', '.join(known)}")
    for key, entry in value.items():
        if key not in known:
            raise InvalidRequestError(f"{name}.{shown(key)} is unknown; known are {', '.join(known)}", name)
        if entry is not None:
            boolean(f"{name}.{key}", entry)
    return value
