"""Requests made from an OpenAPI document and bent out of shape."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

MAX_TOKENS = 6  # what is answered should be answered soon

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 17, 2**31, -(2**63), 2**64, 10**400, 0.0, -0.5, 1e308, 1e-308, "", " ", "x", "\x00",
    "\u202e\x1b[2J", "🦙" * 50, "null", "1", [], {}, [[]], [{}], {"": None}, [None], "x" * 3000, ["x"] * 300, [1] * 600,
    {"type": "json_object"}, {"type": "function", "function": {}}, "<|im_start|>", "<|eot_id|>", [[1, 2], [3]],
]  # fmt: skip
ROLES = ("system", "user", "assistant", "tool", "ipython", "developer", "king", "", None)
BAD_BODIES = (
    b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"{" * 3000, b"[" * 100_000, b'{"prompt": "\\ud800"}',
    b'{"a": NaN}', b'{"prompt": "x", "prompt": 1}', b"\x00" * 64, b'{"prompt": 1e999}', b"\xef\xbb\xbf{}",
)  # fmt: skip


@dataclass(frozen=True)
class HostileRequest:
    method: str
    path: str
    body: bytes | None
    headers: dict[str, str] = field(default_factory=dict)


def hostile_request(document: dict[str, Any], rng: random.Random) -> HostileRequest:
    """A request that follows the document in most respects, and breaks with it in a few."""
    path = rng.choice([*document["paths"], "/v1/completions", "/v1/chat/completions"])
    operations = document["paths"][path]
    methods = [method for method in operations if method != "parameters"]
    method = rng.choice(methods)
    url = path.replace("{model}", rng.choice(["demo", "x", "%00", "%ED%A0%80", "a%2Fb", "..%2f..", "🦙"]))
    if rng.random() < 0.03:
        method, url = rng.choice([("delete", url), ("put", url), ("get", url + "/x"), ("head", url), ("options", url)])
    headers = {"Content-Type": "application/json"}
    if rng.random() < 0.05:
        headers |= rng.choice(
            [
                {"Content-Type": "text/plain"},
                {"Content-Encoding": "gzip"},
                {"Authorization": "Bearer \xe9"},
                {"X-Request-Id": "x" * 500},
                {"Origin": "null"},
                {"Accept": "text/html"},
            ]
        )
    body = None
    if "requestBody" in operations.get(method, {}):
        body = _body(operations[method]["requestBody"]["content"]["application/json"]["schema"], rng)
    return HostileRequest(method.upper(), url, body, headers)


def _body(schema: dict[str, Any], rng: random.Random) -> bytes:
    if rng.random() < 0.08:
        return rng.choice(BAD_BODIES)
    fields = schema["properties"]
    chosen = set(schema["required"]) | {name for name in fields if rng.random() < 0.15}
    body = {name: _value(fields[name], rng) for name in chosen}
    if "messages" in fields:
        body["messages"] = [_message(rng) for _ in range(rng.randrange(1, 4))]
        body.pop("prompt", None)
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        body[rng.choice([*fields, "tools", "response_format", "\x00", "é"])] = rng.choice(ODD)
    if "max_tokens" in fields and rng.random() < 0.95:
        body["max_tokens"] = rng.randrange(1, MAX_TOKENS)
        body.pop("max_completion_tokens", None)
    if isinstance(body.get("n"), int) and body["n"] > 4:
        body["n"] = rng.choice([body["n"], 2, 3])
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.03:
        where = rng.randrange(len(data) + 1)
        data = data[:where] + rng.choice([b"", b"}", b"\xff", b",", b'"']) + data[where + rng.randrange(3) :]
    return data


def _message(rng: random.Random) -> Any:
    if rng.random() < 0.1:
        return rng.choice(ODD)
    content = rng.choice(["hi", "", "🦙", [{"type": "text", "text": "a"}], rng.choice(ODD)])
    message = {"role": rng.choice(ROLES[:4] if rng.random() < 0.8 else ROLES), "content": content}
    if rng.random() < 0.1:
        message[rng.choice(["name", "tool_calls", "tool_call_id", "x"])] = rng.choice(ODD)
    return message


def _value(schema: dict[str, Any], rng: random.Random) -> Any:
    """A value that the schema allows, at its edges where it has some."""
    if "anyOf" in schema:
        return _value(rng.choice(schema["anyOf"]), rng)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    high = schema.get("maximum", low + 10)
    match schema.get("type"):
        case "integer":
            return rng.choice([low, high, rng.randint(low, min(high, low + 20))])
        case "number":
            return rng.choice([rng.uniform(low, high), high])
        case "string":
            return rng.choice(["x", "hello world", "é🦙", "a" * 200])
        case "boolean":
            return rng.random() < 0.5
        case "array":
            size = rng.randint(schema.get("minItems", 0), min(schema.get("maxItems", 4), 4))
            return [_value(schema["items"], rng) for _ in range(size)]
        case "null":
            return None
        case "object" if "properties" in schema:
            return {name: _value(inner, rng) for name, inner in schema["properties"].items() if rng.random() < 0.5}
        case "object":
            return {str(rng.randrange(100)): _value(_inner(schema), rng) for _ in range(2)}
    return rng.choice(ODD)


def _inner(schema: dict[str, Any]) -> dict[str, Any]:
    inner = schema.get("additionalProperties", {})
    return inner if isinstance(inner, dict) else {}
