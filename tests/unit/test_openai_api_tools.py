"""Tools, response formats, echo and prompt scores: what is refused, what the answer is held to, how it is told."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jsonschema_rs
import openai.types.chat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corellm.errors import InvalidRequestError
from corellm.openai_api.chunks import StreamedAnswer
from corellm.openai_api.fields import Endpoint
from corellm.openai_api.requests import ChatRequest, CompletionRequest, parse_request
from corellm.openai_api.responses import Head, chat_body, response_body
from corellm.openai_api.tools import ToolUse, split_calls
from corellm.sampling_params import JsonConstraint, SamplingParams
from corellm.text_engine import Completion, Delta, PromptLogprob, TokenLogprob
from tests.support.fake_text_engine import ByteTokenizer, answer


def function(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


# Its references are to parts of itself.
PLACE = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "near": {"$ref": "#"}},
    "required": ["city"],
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}
TOOLS = [function("weather", PLACE), function("now")]


def chat(**fields: Any) -> ChatRequest:
    request = parse_request(Endpoint.CHAT, {"messages": [{"role": "user", "content": "hi"}], **fields})
    assert isinstance(request, ChatRequest)
    return request


def constraint(**fields: Any) -> JsonConstraint | None:
    return chat(**fields).generation.params.constraint


def schema_of(found: JsonConstraint | None) -> jsonschema_rs.Draft202012Validator:
    assert found is not None
    return jsonschema_rs.Draft202012Validator(json.loads(found.schema))


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "parameters": arguments}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "retrieval"}], "tools[0].type"),
        ([function("f"), {"type": "function"}], "tools[1].function"),
        ([function("f"), function("f")], "tools[1].function.name"),
        ([function("f g")], "tools[0].function.name"),
        ([function("")], "tools[0].function.name"),
        ([function("f", [])], "tools[0].function.parameters"),
        ([function("f", {"type": "string"})], "tools[0].function.parameters.type"),
        ([function("f", {"type": ["array", "null"]})], "tools[0].function.parameters.type"),
        ([function("f", strict=1)], "tools[0].function.strict"),
        ([function("f", json.loads('{"items":' * 101 + "{}" + "}" * 101))], "tools[0].function.parameters"),
    ],
)
def test_malformed_tools_are_named(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        chat(tools=tools)
    assert refused.value.param == param
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(
    ("format", "param"),
    [
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": True}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, "response_format.json_schema.strict"),
        ({"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 140_000]}}}, "response_format"),
        ({"type": "json_schema", "json_schema": {"schema": json.loads("[" * 99 + "]" * 99)}}, None),
    ],
)
def test_malformed_formats_are_named(format: Any, param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        chat(response_format=format)
    assert refused.value.param == (param or "response_format.json_schema.schema")
    assert len(refused.value.message) < 200


def test_formats_become_constraints() -> None:
    assert constraint(response_format={"type": "text"}) is None
    assert schema_of(constraint(response_format={"type": "json_object"})).is_valid({})
    for strict in (True, False, None):
        found = constraint(
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": PLACE, "strict": strict}}
        )
        assert found == JsonConstraint(json.dumps(PLACE), lenient=not strict)
    request = parse_request(Endpoint.COMPLETIONS, {"prompt": "x", "response_format": {"type": "json_object"}})
    assert isinstance(request, CompletionRequest)
    assert request.generation.params.constraint == constraint(response_format={"type": "json_object"})


def test_an_answer_held_to_json_cannot_ignore_its_end() -> None:
    for name, value in (("ignore_eos", True), ("min_tokens", 5)):
        with pytest.raises(InvalidRequestError, match=f"{name} is given, but an answer held to") as refused:
            chat(response_format={"type": "json_object"}, **{name: value})
        assert refused.value.param == name


def test_a_free_choice_holds_to_nothing_and_none_hides_the_tools() -> None:
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
        request = chat(tools=TOOLS, **choice)
        assert request.tools is not None
        assert request.generation.params.constraint is None
        assert not request.generation.params.skip_special_tokens
    for fields in ({"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}, {}):
        request = chat(**fields)
        assert request.tools is None
        assert request.generation.params.skip_special_tokens


def test_required_means_one_of_the_functions() -> None:
    found = constraint(tools=[*TOOLS, {"type": "code_interpreter"}], tool_choice="required")
    valid = schema_of(found).is_valid
    assert valid(call("weather", city="Rome", near={"city": "Oslo"}))
    assert valid(call("now"))
    for other in (
        call("weather", city="Paris"), call("weather"), call("weather", city="Rome", near={"city": "Paris"}),
        call("now", x=1), call("code_interpreter"), {"name": "now"}, {**call("now"), "more": 1}, "text",
    ):  # fmt: skip
        assert not valid(other), other
    assert found is not None
    assert (found.separator, found.param, found.lenient) == ("; ", "tools", True)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"properties": {"city": {"type": "string"}}},
        {"anyOf": [{"required": ["city"]}, {}]},
        {"type": ["object", "null"]},
    ],
)
def test_arguments_are_an_object_whatever_the_schema_leaves_open(parameters: Any) -> None:
    """A call with anything else would not be found in the answer."""
    valid = schema_of(constraint(tools=[function("f", parameters)], tool_choice="required")).is_valid
    assert valid(call("f", city="Rome"))
    for other in (5, "Rome", [], None):
        assert not valid({"name": "f", "parameters": other})


def test_references_lead_to_parts_of_their_own_schema() -> None:
    def held(kind: str) -> dict[str, Any]:
        city = {"$anchor": "city", "type": kind}
        properties = {"by_path": {"$ref": "#/$defs/city"}, "by_name": {"$ref": "#city"}, "inner": {"$ref": "#"}}
        own = {"$id": "https://example.org/x", "$defs": {"city": city}, "additionalProperties": False}
        return {"type": "object", "properties": properties, **own}

    tools = [function("words", held("string")), function("numbers", held("integer"))]
    wanted = {"type": "json_schema", "json_schema": {"schema": held("boolean")}}
    valid = schema_of(constraint(tools=tools, response_format=wanted)).is_valid
    for right, wrong, told in (
        ("x", 1, lambda fields: call("words", **fields)),
        (1, "x", lambda fields: call("numbers", **fields)),
        (True, "x", lambda fields: fields),
    ):
        for place in ("by_path", "by_name"):
            assert valid(told({place: right, "inner": {place: right}}))
            assert not valid(told({place: wrong}))
            assert not valid(told({"inner": {place: wrong}}))


def test_a_named_function_is_the_only_one_and_called_once() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    found = constraint(tools=[function("weather", PLACE, strict=True), function("now")], tool_choice=named)
    valid = schema_of(found).is_valid
    assert valid(call("weather", city="Rome"))
    assert not valid(call("now"))
    assert found is not None
    assert (found.separator, found.lenient) == ("", False)
    single = constraint(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert single is not None
    assert single.separator == ""


def test_a_choice_that_cannot_be_met_is_refused() -> None:
    for fields in (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}},
        {"tools": [{"type": "code_interpreter"}], "tool_choice": "required"},
        {"tool_choice": "required"},
    ):
        with pytest.raises(InvalidRequestError) as refused:
            chat(**fields)
        assert refused.value.param == "tool_choice"


def test_with_a_format_the_answer_is_of_it_or_a_call() -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": PLACE}}
    valid = schema_of(constraint(tools=TOOLS, response_format=wanted)).is_valid
    assert valid({"city": "Rome", "near": {"city": "Oslo"}})
    assert valid(call("now"))
    assert not valid({"city": "Paris"})
    forced = schema_of(constraint(tools=TOOLS, response_format=wanted, tool_choice="required")).is_valid
    assert not forced({"city": "Rome"})


def told(text: str, tools: ToolUse | None, reason: str = "stop") -> dict[str, Any]:
    completion = replace(answer("", SamplingParams()), text=text, finish_reason=reason)
    body = chat_body(Head("id", 1, "m"), [completion], ByteTokenizer().token_bytes, tools=tools)
    openai.types.chat.ChatCompletion.model_validate(body, strict=True)
    choice: dict[str, Any] = body["choices"][0]
    return choice


def test_messages_with_calls() -> None:
    tools = chat(tools=TOOLS).tools
    choice = told('{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"city": "Rome"}}', tools)
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert [(c["type"], c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("function", "now", "{}"),
        ("function", "weather", '{"city": "Rome"}'),
    ]
    assert len({c["id"] for c in calls}) == 2
    assert choice["finish_reason"] == "tool_calls"
    assert told('{"name": "now", "parameters": {"a', tools, "length")["finish_reason"] == "length"
    plain = told("Hello.", tools)
    assert (plain["message"]["content"], plain["finish_reason"]) == ("Hello.", "stop")
    assert "tool_calls" not in plain["message"]
    assert told('{"name": "now", "parameters": {}}', None)["message"]["content"].startswith("{")


def test_only_one_call_where_they_are_not_to_be_parallel() -> None:
    tools = chat(tools=TOOLS, parallel_tool_calls=False).tools
    assert tools is not None
    content, calls = split_calls('{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', tools)
    assert content is None
    assert len(calls) == 1


SAID = (
    'One moment.\n\n{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "now", "parameters": {}}\nDone.',
    '{"name": "now", "parameters": {"cut',
    "<|python_tag|>print(1)",
    "Just words, {and} braces.\n",
)


@pytest.mark.parametrize("text", SAID)
@pytest.mark.parametrize("reason", ["stop", "length"])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_streamed_calls_join_to_the_whole_message(text: str, reason: str, data: st.DataObject) -> None:
    request = chat(tools=[*TOOLS, {"type": "code_interpreter"}], stream=True)
    whole = told(text, request.tools, reason)
    end = replace(answer("", SamplingParams()), text=text, finish_reason=reason)
    places = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))), len(text)]
    deltas = [Delta(text=text[start:stop], token_ids=[1]) for start, stop in pairwise(places)]
    deltas[-1].end = end
    streamed = StreamedAnswer(request, Head("id", 1, "m"), ByteTokenizer().token_bytes, [1])
    chunks = [chunk for delta in deltas for chunk in streamed.push(0, delta)]
    content, calls, reasons = "", [], []
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk, strict=True)
        choice = chunk["choices"][0]
        reasons.append(choice["finish_reason"])
        content += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls", []):
            if "id" in piece:
                assert piece["index"] == len(calls)
                calls.append([piece["function"]["name"], piece["function"]["arguments"]])
            else:
                calls[piece["index"]][1] += piece["function"]["arguments"]
    assert content == (whole["message"]["content"] or "")
    known = whole["message"].get("tool_calls", [])
    assert calls == [[call["function"]["name"], call["function"]["arguments"]] for call in known]
    assert [reason for reason in reasons if reason] == [whole["finish_reason"]]


def test_log_probabilities_come_with_calls_too() -> None:
    request = chat(tools=TOOLS, stream=True, logprobs=True)
    streamed = StreamedAnswer(request, Head("id", 1, "m"), ByteTokenizer().token_bytes, [1])
    text = '{"name": "now", "parameters": {}}'
    scores = [TokenLogprob(ord(char), -0.5, ()) for char in text]
    chunks = [
        chunk
        for char, score in zip(text, scores, strict=True)
        for chunk in streamed.push(0, Delta(text=char, token_ids=[score.token_id], logprobs=[score]))
    ]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert "".join(entry["token"] for part in parts if part for entry in part["content"]) == text


def scored(prompt: bytes, text: str, top: int) -> Completion:
    likely = tuple((97 + number, -1.0 - number) for number in range(top))
    known = [PromptLogprob(token, -0.25, 3, likely) for token in prompt[1:]]
    completion = answer("", SamplingParams())
    output = tuple(TokenLogprob(token, -0.5, likely) for token in text.encode())
    return replace(completion, text=text, logprobs=output, prompt_logprobs=(PromptLogprob(prompt[0]), *known))


@pytest.mark.parametrize("bos", [b"", b"\x01"])
@pytest.mark.parametrize("prompt", ["né", [ord("n"), 0xC3, 0xA9]])
def test_an_echoed_prompt_is_whole_and_streamed_the_same(bos: bytes, prompt: Any) -> None:
    request = parse_request(Endpoint.COMPLETIONS, {"prompt": prompt, "echo": True, "logprobs": 1, "stream": True})
    completion = scored(bos + "né".encode(), " ok", 1)
    body = response_body(request, Head("id", 1, "m"), [[completion]], ByteTokenizer().token_bytes)
    choice = body["choices"][0]
    found = choice["logprobs"]
    assert choice["text"] == "né ok"
    assert found["tokens"] == [*map(chr, bos), "n", "bytes:\\xc3", "bytes:\\xa9", " ", "o", "k"]
    assert found["text_offset"] == [0] * len(bos) + [0, 1, 1, 2, 3, 4]
    assert found["token_logprobs"] == [None, *[-0.25] * (len(bos) + 2), -0.5, -0.5, -0.5]
    assert found["top_logprobs"][:2] == [None, {"a": -1.0, found["tokens"][1]: -0.25}]

    streamed = StreamedAnswer(request, Head("id", 1, "m"), ByteTokenizer().token_bytes, [len(bos) + 3])
    first = Delta(text=" o", token_ids=[32, 111], logprobs=list(completion.logprobs or ())[:2],
                  prompt_logprobs=completion.prompt_logprobs)  # fmt: skip
    last = Delta(text="k", token_ids=[107], logprobs=list(completion.logprobs or ())[2:], end=completion)
    chunks = [chunk["choices"][0] for delta in (first, last) for chunk in streamed.push(0, delta)]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    for name, entries in found.items():
        assert [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"][name]] == entries


@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_a_prompt_alone_is_the_echo_without_the_answer_whole_and_streamed(logprobs: int | None) -> None:
    """Against the same request with an answer, cut where the prompt ends."""
    fields = {"prompt": "né", "echo": True, "logprobs": logprobs, "stream": True}
    head, token_bytes = Head("id", 1, "m"), ByteTokenizer().token_bytes
    completion = scored("né".encode(), "k", logprobs or 0)
    if logprobs is None:
        completion = replace(completion, logprobs=None, prompt_logprobs=None)
    completion = replace(completion, finish_reason="stop", prompt_tokens=3, cached_tokens=0, output_tokens=1)
    with_answer = parse_request(Endpoint.COMPLETIONS, {**fields, "max_tokens": 1})
    alone = parse_request(Endpoint.COMPLETIONS, {**fields, "max_tokens": 0, "stream_options": {"include_usage": True}})
    assert alone.generation.params == with_answer.generation.params

    full = response_body(with_answer, head, [[completion]], token_bytes)["choices"][0]
    body = response_body(alone, head, [[completion]], token_bytes)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("né", "length")
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 0)
    assert choice["logprobs"] == (
        None
        if full["logprobs"] is None
        else {name: None if entries is None else entries[:3] for name, entries in full["logprobs"].items()}
    )

    streamed = StreamedAnswer(alone, head, token_bytes, [3])
    scores = list(completion.logprobs or ())
    first = Delta(text="k", token_ids=[107], logprobs=scores, prompt_logprobs=completion.prompt_logprobs)
    chunks = [chunk for delta in (first, Delta(text="", end=completion)) for chunk in streamed.push(0, delta)]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == "né"
    assert [part["logprobs"] for part in parts if part["logprobs"]] == [choice["logprobs"]] * (logprobs is not None)
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
    assert next(streamed.finish())["usage"] == body["usage"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_completion_tokens": 0, "prompt_logprobs": 1}, "max_completion_tokens"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ],
)
def test_no_tokens_at_all_are_for_an_echo_alone(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse_request(Endpoint.COMPLETIONS, {"prompt": "x", **fields})
    assert refused.value.param == param
    with pytest.raises(InvalidRequestError, match="max_tokens is 0"):
        chat(max_tokens=0)


def test_an_echo_without_scores_is_text_alone() -> None:
    request = parse_request(Endpoint.COMPLETIONS, {"prompt": ["a", "b"], "echo": True, "n": 2})
    completion = answer("", SamplingParams())
    body = response_body(request, Head("id", 1, "m"), [[completion] * 2] * 2, ByteTokenizer().token_bytes)
    assert [choice["text"] for choice in body["choices"]] == ["a<>", "a<>", "b<>", "b<>"]
    assert request.generation.params.prompt_logprobs is None


def test_prompt_scores_in_vllms_shape() -> None:
    completion = scored(b"xab", "", 2)
    expected = [
        None,
        {
            "97": {"logprob": -0.25, "rank": 3, "decoded_token": "a"},
            "98": {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
        },
        {
            "97": {"logprob": -1.0, "rank": 1, "decoded_token": "a"},
            "98": {"logprob": -0.25, "rank": 3, "decoded_token": "b"},
        },
    ]
    completions = parse_request(Endpoint.COMPLETIONS, {"prompt": "xab", "prompt_logprobs": 2})
    body = response_body(completions, Head("id", 1, "m"), [[completion]], ByteTokenizer().token_bytes)
    assert body["choices"][0]["prompt_logprobs"] == expected
    body = response_body(chat(prompt_logprobs=2), Head("id", 1, "m"), [[completion]], ByteTokenizer().token_bytes)
    assert body["prompt_logprobs"] == expected
    with pytest.raises(InvalidRequestError, match="stream") as refused:
        chat(prompt_logprobs=2, stream=True)
    assert refused.value.param == "prompt_logprobs"
    both = parse_request(Endpoint.COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 3, "prompt_logprobs": 1})
    assert both.generation.params.prompt_logprobs == 3
