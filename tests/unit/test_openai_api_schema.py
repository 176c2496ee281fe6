"""The OpenAPI file against the validation: field by field, both accept and refuse the same values."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

from corellm.errors import InvalidRequestError
from corellm.openai_api.fields import TABLES, Endpoint
from corellm.openai_api.requests import parse_request
from corellm.openai_api.schema import openapi, request_schema
from corellm.openai_api.tokenize import parse_detokenize, parse_tokenize
from corellm.text.chat_messages import parse_messages

REQUIRED: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {"messages": [{"role": "user", "content": "x"}]},
    Endpoint.COMPLETIONS: {"prompt": "x"},
}
# What a field needs beside it for its own value to be all that decides.
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "continue_final_message": {"add_generation_prompt": False},
    "min_tokens": {"max_tokens": 2**31 - 1},
}
BESIDE_AT_COMPLETIONS: dict[str, dict[str, Any]] = {
    "max_tokens": {"echo": True},
    "max_completion_tokens": {"echo": True},
}
# A description of one field cannot say these.
NOT_OF_ONE_FIELD = {"best_of"}

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, -2, -3, 3, 10, 11, 16, 20, 21, 100, 101, 128, 129, 256, 2**31 - 1, 2**31, 2**63 - 1,
    2**63, -(2**63), -(2**63) - 1, 0.5, 1.5, -0.5, -2.5, 2.5, 1e-9, 1e300, "", "x", "user", "auto", [], {}, [""], ["x"],
    ["x", 1], ["x"] * 16, ["x"] * 17, [1], [-1], [2**31], [0.5], [True], [1] * 256, [1] * 257, [[1]], [[]], [[1], []],
    [["x"]], [{}],
    {"1": 1}, {"1": 101}, {"1": -100}, {"1": "x"}, {"x": 1}, {"12345678901": 1}, {"include_usage": True},
    {"include_usage": None}, {"include_usage": 1}, {"other": True}, {"type": "text"},
    {"type": "json_object"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": []}},
    {"type": "json_schema", "json_schema": {"schema": {}}}, {"type": "function", "function": {}},
    {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, [{"type": "code_interpreter"}],
    [{"type": "function"}], [{"type": "function", "function": {"name": "f"}}],
    [{"type": "function", "function": {"name": "f", "strict": None, "parameters": {}}}],
    [{"type": "function", "function": {"name": "f", "parameters": []}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": ["null", "object"]}}}],
    [{"type": "function", "function": {"name": "f f"}}], [{"type": "other", "function": {"name": "f"}}],
]  # fmt: skip


def accepts(endpoint: Endpoint, body: dict[str, Any]) -> bool:
    try:
        parse_request(endpoint, body)
    except InvalidRequestError:
        return False
    return True


def described_fields() -> list[tuple[Endpoint, str]]:
    names = [(endpoint, name) for endpoint in Endpoint for name in request_schema(endpoint)["properties"]]
    return [(endpoint, name) for endpoint, name in names if name not in NOT_OF_ONE_FIELD]


@pytest.mark.parametrize(("endpoint", "name"), described_fields())
def test_a_field_is_described_as_it_is_checked(endpoint: Endpoint, name: str) -> None:
    validator = jsonschema_rs.Draft202012Validator(request_schema(endpoint))
    outcomes = set()
    beside = BESIDE.get(name) or (BESIDE_AT_COMPLETIONS.get(name, {}) if endpoint is Endpoint.COMPLETIONS else {})
    for value in VALUES:
        if name == "messages" and isinstance(value, list) and value and isinstance(value[0], dict):
            continue  # what a message holds is the prompt format's to check
        if name == "stream_options" and value == {"include_usage": None}:
            continue  # a null there means the default; no use to describe
        body = {**REQUIRED[endpoint], **beside, name: value}
        accepted = accepts(endpoint, body)
        assert validator.is_valid(body) == accepted, value
        outcomes.add(accepted)
    assert False in outcomes
    assert True in outcomes or name == "messages"


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x"},
        {"role": "developer", "content": [{"type": "text", "text": "x"}]},
        {"role": "tool", "content": "x", "tool_call_id": "c1"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": [{"function": {}}]},
        {"role": "user", "content": None, "tool_calls": [CALL]},
        {"role": "user"},
        {"role": "king", "content": "x"},
        {"content": "x"},
        {"role": "user", "content": [{"type": "image_url"}]},
    ],
)
def test_a_message_is_described_as_prompts_take_it(message: dict[str, Any]) -> None:
    validator = jsonschema_rs.Draft202012Validator(request_schema(Endpoint.CHAT))
    try:
        parse_messages([message])
    except InvalidRequestError:
        assert not validator.is_valid({"messages": [message]})
    else:
        assert validator.is_valid({"messages": [message]})


def test_a_role_that_is_none_is_refused_with_every_role_that_is_one() -> None:
    roles = request_schema(Endpoint.CHAT)["properties"]["messages"]["items"]["anyOf"][0]["properties"]["role"]["enum"]
    with pytest.raises(InvalidRequestError) as refused:
        parse_messages([{"role": "king", "content": "x"}])
    listed = refused.value.message.partition("one of ")[2]
    assert sorted(listed.split(", ")) == sorted(roles)


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_every_field_that_does_something_is_described(endpoint: Endpoint) -> None:
    """What is not described is refused unless it asks for nothing: of any list of values, nearly all."""
    described = request_schema(endpoint)["properties"]
    assert set(described) <= set(TABLES[endpoint])
    values = [value for value in VALUES if value is not None]
    for name in set(TABLES[endpoint]) - set(described):
        taken = [value for value in values if accepts(endpoint, {**REQUIRED[endpoint], name: value})]
        assert len(taken) <= 1, (name, taken)


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_unknown_and_missing_fields_are_refused_by_both(endpoint: Endpoint) -> None:
    validator = jsonschema_rs.Draft202012Validator(request_schema(endpoint))
    for body in ({**REQUIRED[endpoint], "other": 1}, {}):
        assert not validator.is_valid(body)
        assert not accepts(endpoint, body)


def test_tokenize_and_detokenize_are_described_as_they_are_checked() -> None:
    paths = openapi("1")["paths"]
    for path, parse, base, fields in (
        ("/tokenize", parse_tokenize, {"prompt": "x"}, ("model", "add_special_tokens", "return_token_strs")),
        ("/detokenize", parse_detokenize, {}, ("tokens",)),
    ):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        validator = jsonschema_rs.Draft202012Validator(schema)
        for name in fields:
            for value in VALUES:
                body = {**base, name: value}
                try:
                    parse(body)
                    accepted = True
                except InvalidRequestError:
                    accepted = False
                assert validator.is_valid(body) == accepted, (name, value)


def test_the_document_is_openapi_3_1() -> None:
    document = openapi("1.2.3")
    assert document["info"]["version"] == "1.2.3"
    assert set(document["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/health", "/metrics",
        "/tokenize", "/detokenize", "/version", "/openapi.json",
    }  # fmt: skip
    for path in document["paths"].values():
        for method, operation in path.items():
            if method != "parameters":
                error = operation["responses"]["default"]["content"]["application/json"]["schema"]
                assert error == {"$ref": "#/components/schemas/Error"}
