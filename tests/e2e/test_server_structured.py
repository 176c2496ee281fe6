"""Tools, response formats, echo and prompt scores through the official client, against a real server with the demo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.serve_process import ServeProcess

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo, in C?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string", "maxLength": 20}},
        },
    },
}
FORCED: dict[str, Any] = {
    "messages": QUESTION,
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "temperature": 0,
    "max_tokens": 60,
}


class Person(BaseModel):
    name: str
    age: int
    likes_snow: bool


@pytest.fixture(scope="module")
def client(demo_server: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def test_a_forced_call_is_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(model="demo", **FORCED).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] == "Oslo"

    name, arguments, reasons, ids = "", "", [], set()
    for chunk in client.chat.completions.create(model="demo", stream=True, **FORCED):
        delta = chunk.choices[0].delta
        assert not delta.content
        for piece in delta.tool_calls or []:
            assert piece.index == 0
            assert piece.function is not None
            ids |= {piece.id} - {None}
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert (name, arguments) == ("weather", call.function.arguments)
    assert len(ids) == 1
    assert [reason for reason in reasons if reason] == ["tool_calls"]


def test_what_a_tool_returned_goes_back_into_the_conversation(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    conversation: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"degrees": -4}'},
    ]
    answer = client.chat.completions.create(model="demo", messages=conversation, tools=[WEATHER], max_tokens=8)
    assert answer.usage is not None
    without = client.chat.completions.create(model="demo", messages=QUESTION, tools=[WEATHER], max_tokens=8)
    assert without.usage is not None
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens + 20


def test_the_clients_own_parsing_helper_gets_its_type(client: openai.OpenAI) -> None:
    ask: list[Any] = [{"role": "user", "content": "Invent a person."}]
    answer = client.chat.completions.parse(
        model="demo", messages=ask, response_format=Person, max_tokens=200, extra_body={"repetition_penalty": 1.1}
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_json_objects_and_json_that_is_cut_off(client: openai.OpenAI) -> None:
    ask: list[Any] = [{"role": "user", "content": "Say hello as JSON."}]
    schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [{"hello": "world"}]}}}
    whole = client.chat.completions.create(model="demo", messages=ask, response_format=schema).choices[0]
    assert json.loads(whole.message.content or "") == {"hello": "world"}
    assert whole.finish_reason == "stop"
    cut = client.chat.completions.create(
        model="demo", messages=ask, response_format={"type": "json_object"}, max_tokens=3
    ).choices[0]
    assert (cut.message.content or "").lstrip().startswith("{")
    assert cut.finish_reason == "length"


def test_a_schema_that_cannot_be_used_is_a_bad_request(client: openai.OpenAI) -> None:
    hostile = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]}
    for schema in ({"type": "objekt"}, hostile):
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="demo", messages=QUESTION, response_format=wanted)
        assert refused.value.param == "response_format"


def test_an_echoed_prompt_and_its_scores(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "demo", "prompt": "Snow is", "echo": True, "logprobs": 2, "max_tokens": 4}
    choice = client.completions.create(**fields, temperature=0).choices[0]
    assert choice.text.startswith("Snow is")
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert "".join(found.tokens) == choice.text
    assert all(choice.text.startswith(token, at) for at, token in zip(found.text_offset, found.tokens, strict=True))
    assert found.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in found.token_logprobs[1:])
    assert all(len(top) in (2, 3) for top in found.top_logprobs[1:])

    chunks = list(client.completions.create(**fields, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert [token for part in streamed for token in part.tokens or ()] == found.tokens
    assert [at for part in streamed for at in part.text_offset or ()] == found.text_offset

    alone = client.completions.create(**{**fields, "max_tokens": 0})
    assert (alone.choices[0].text, alone.choices[0].finish_reason) == ("Snow is", "length")
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0
    scores = alone.choices[0].logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.token_logprobs is not None
    count = alone.usage.prompt_tokens
    assert scores.tokens == found.tokens[:count]
    assert scores.token_logprobs[1:] == pytest.approx(found.token_logprobs[1:count], abs=1e-4)

    scored = client.completions.create(model="demo", prompt="Snow is", max_tokens=1, extra_body={"prompt_logprobs": 1})
    entries = scored.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    assert entries[0] is None
    assert all(1 <= len(entry) <= 2 for entry in entries[1:])
    assert {entry["rank"] for tokens in entries[1:] for entry in tokens.values()} >= {1}
