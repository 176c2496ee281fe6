"""The kinds of values that OpenAI request fields hold: each is a function that checks a JSON value and converts it.

A kind takes the field's name and its value (never null: null means default) and raises `InvalidRequestError`, naming
the field, when the value is of the wrong type or out of range.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
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


def refuse(name: str, value: Any, allowed: str, param: str | None = None) -> NoReturn:
    """`param` is the field where `name` is a part of it."""
    raise InvalidRequestError(f"{name} is {shown(value)}; it must be {allowed}", param or name)


def refuse_member(name: str, holder: Mapping[str, Any], key: str, allowed: str) -> NoReturn:
    """Refuse what `holder`, which is called `name`, has under `key`, if it has anything there."""
    path = f"{name}.{key}"
    if holder.get(key) is None:
        raise InvalidRequestError(f"{path} is missing; it must be {allowed}", path)
    refuse(path, holder[key], allowed)


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


def an_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(name, value, "an object")
    return value


def unsupported(*harmless: Any) -> Kind:
    """A field of OpenAI's whose function CoreLLM lacks: refused unless its value asks for nothing."""

    def check(name: str, value: Any) -> None:
        if not any(type(value) is type(known) and value == known for known in harmless):
            raise InvalidRequestError(f"{name} is not supported here; leave it out of the request", name)

    return check


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) and value:
        return (value,)
    if not isinstance(value, list):
        refuse(name, value, f"a non-empty string or a list of at most {MAX_STOP_STRINGS} of them")
    for index, entry in enumerate(value):
        if not isinstance(entry, str) or not entry:
            refuse(f"{name}[{index}]", entry, "a non-empty string", name)
    return tuple(value)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        refuse(name, value, "a list of token ids")
    return _token_ids(name, value, name)


def _token_ids(path: str, value: list[Any], param: str) -> tuple[int, ...]:
    for index, entry in enumerate(value):
        if not is_integer(entry) or not 0 <= entry <= MAX_INT32:
            refuse(f"{path}[{index}]", entry, f"a token id, an integer from 0 to {MAX_INT32}", param)
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
    if not isinstance(value, list) or not value:
        refuse(name, value, "a string, a list of strings, a list of token ids or a list of lists of them, not empty")
    if is_integer(value[0]):
        return (_token_ids(name, value, name),)
    if not isinstance(value[0], str | list):
        refuse(f"{name}[0]", value[0], "a string, a token id or a list of token ids", name)
    return tuple(_prompt(f"{name}[{index}]", entry, type(value[0]), name) for index, entry in enumerate(value))


def _prompt(path: str, entry: Any, kind: type, param: str) -> str | tuple[int, ...]:
    """One of several, which are all of the first one's kind: a string, or a list of token ids."""
    if kind is str:
        if not isinstance(entry, str):
            refuse(path, entry, "a string, as the first one is", param)
        return entry
    if not isinstance(entry, list) or not entry:
        refuse(path, entry, "a list of at least one token id", param)
    return _token_ids(path, entry, param)


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
    if not isinstance(value, dict):
        refuse(name, value, 'an object such as {"type": "json_object"}')
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonConstraint('{"type": "object"}', param=name)
    if kind != "json_schema":
        refuse_member(name, value, "type", "text, json_object or json_schema")
    wanted = value.get("json_schema")
    if not isinstance(wanted, dict):
        refuse_member(name, value, "json_schema", 'an object such as {"name": "…", "schema": {…}}')
    schema = wanted.get("schema")
    if not isinstance(schema, dict):
        refuse_member(f"{name}.json_schema", wanted, "schema", "a JSON schema, which is an object")
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
