"""Chatting over HTTP: what is sent, what is made of every kind of reply, and that the key stays where it belongs."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from aiohttp import web

from corellm.chat import http_backend
from corellm.chat.answer_chunks import AnswerChunks
from corellm.chat.backend import AnswerEnd
from corellm.chat.http_backend import HttpBackend
from corellm.chat.sse import EventParser
from corellm.errors import CoreLLMError, PromptTooLongError, UpstreamError
from tests.support.chat_server import ChatServer, chat_server

QUESTION = [{"role": "user", "content": "hi"}]


def ask(
    server: ChatServer, *, model: str | None = None, key: str | None = None, sampling: dict[str, Any] | None = None
) -> tuple[str, AnswerEnd]:
    async def run() -> tuple[str, AnswerEnd]:
        backend = await HttpBackend.connect(server.url, key, model)
        try:
            pieces = [piece async for piece in backend.stream(QUESTION, sampling or {}, [])]
        finally:
            await backend.close()
        end = pieces[-1].end
        assert end is not None
        return "".join(piece.text for piece in pieces), end

    return asyncio.run(run())


def test_an_answer_and_its_figures() -> None:
    with chat_server(lambda body: ["hel", "lo 👩‍👩‍👧"], pause_s=0.02) as server:
        text, end = ask(server, key="sk-x", sampling={"temperature": 0.5, "stop": ["END"]})
    assert text == "hello 👩‍👩‍👧"
    assert (end.finish_reason, end.prompt_tokens, end.cached_tokens, end.output_tokens) == ("stop", 10, 7, 2)
    assert 0.02 <= end.first_token_s < end.total_s
    (body,) = server.bodies
    assert body == {
        "model": "test-model",
        "messages": QUESTION,
        "temperature": 0.5,
        "stop": ["END"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-x"}


def test_without_a_key_none_is_sent() -> None:
    with chat_server(lambda body: ["x"]) as server:
        ask(server)
    assert all("Authorization" not in headers for headers in server.headers)


@pytest.mark.parametrize(
    ("models", "model", "chosen"),
    [
        ([{"id": "a"}, {"id": "b"}], None, "a"),
        ([{"id": "a"}, {"id": "b"}], "b", "b"),
        ([], "anything", "anything"),
    ],
)
def test_which_model_answers(models: list[dict[str, str]], model: str | None, chosen: str) -> None:
    with chat_server(lambda body: ["x"], models=models) as server:
        ask(server, model=model)
    assert server.bodies[0]["model"] == chosen


@pytest.mark.parametrize(("model", "message"), [("c", "no model 'c'; --model may be one of: a"), (None, None)])
def test_a_model_that_is_not_there(model: str | None, message: str | None) -> None:
    models = [{"id": "a"}] if message else []
    with chat_server(lambda body: ["x"], models=models) as server, pytest.raises(UpstreamError) as found:
        ask(server, model=model)
    assert (message or "give --model") in found.value.message


def refusing(status: int, body: Any) -> web.Response:
    return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        (refusing(401, {"error": {"message": "bad key"}}), UpstreamError, "401: bad key; give the right --api-key"),
        (refusing(429, {"error": {"message": "slow down"}}), UpstreamError, "answers 429: slow down"),
        (refusing(500, "<html>"), UpstreamError, "answers 500: Internal Server Error"),
        (refusing(302, ""), UpstreamError, "answers 302"),
        (refusing(500, "[" * 100_000), UpstreamError, "answers 500: Internal Server Error"),
        (refusing(400, {"more": "x" * 500_000, "error": {"message": "at the end"}}), UpstreamError, "at the end"),
        (
            refusing(400, {"error": {"message": "too many tokens", "code": "context_length_exceeded"}}),
            PromptTooLongError,
            "too many tokens",
        ),
    ],
)  # fmt: skip
def test_refusals_are_one_line(response: web.Response, kind: type[CoreLLMError], message: str) -> None:
    with chat_server(lambda body: response) as server, pytest.raises(kind, match=message) as found:
        ask(server)
    assert "\n" not in found.value.message


@pytest.mark.parametrize(("param", "field"), [("max_tokens", "max_tokens"), (None, "messages"), (3, "messages")])
def test_the_field_that_is_too_long_is_the_one_that_the_server_names(param: object, field: str) -> None:
    error = {"message": "too many tokens", "code": "context_length_exceeded", "param": param}
    with (
        chat_server(lambda body: refusing(400, {"error": error})) as server,
        pytest.raises(PromptTooLongError) as found,
    ):
        ask(server)
    assert found.value.param == field


def test_nobody_there() -> None:
    with chat_server(lambda body: []) as server:
        pass
    with pytest.raises(UpstreamError, match="check --url and that the server runs"):
        ask(server)


def test_a_path_without_an_api() -> None:
    with chat_server(lambda body: []) as server:
        server.url = server.url.replace("/v1", "/v2")
        with pytest.raises(UpstreamError, match="give --model, and check that --url is right"):
            ask(server)


@pytest.mark.parametrize("model", [None, "given"])
def test_an_url_without_a_path_is_told_the_usual_one(model: str | None) -> None:
    with chat_server(lambda body: ["hi"]) as server:
        right = server.url
        server.url = right.removesuffix("/v1")
        with pytest.raises(UpstreamError, match="OpenAI servers usually answer under /v1: try --url") as found:
            ask(server, model=model)
        assert found.value.message.endswith(f" {right}")
        server.url = right
        assert ask(server)[0] == "hi"


@pytest.mark.parametrize("path", ["", "/api"])
def test_a_page_that_is_no_list_of_models(path: str) -> None:
    async def welcome(request: web.Request) -> web.Response:
        return web.Response(text="<html>welcome</html>", content_type="text/html")

    async def run() -> str:
        app = web.Application()
        app.router.add_get(f"{path}/models", welcome)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            with pytest.raises(UpstreamError) as found:
                await HttpBackend.connect(f"http://{host}:{port}{path}", None, None)
            return found.value.message.replace(f"{host}:{port}", "HOST")
        finally:
            await runner.cleanup()

    hints = {
        "": "OpenAI servers usually answer under /v1: try --url http://HOST/v1",
        "/api": "--url is usually http://HOST:PORT/v1",
    }
    assert asyncio.run(run()) == f"http://HOST{path}/models is no list of models; {hints[path]}"


def test_an_answer_that_breaks_off_is_an_error() -> None:
    with (
        chat_server(lambda body: ["half"], break_off=True) as server,
        pytest.raises(UpstreamError, match="broke the answer off"),
    ):
        ask(server)


def test_a_server_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_backend, "SILENCE_S", 0.2)
    with (
        chat_server(lambda body: ["a", "b"], pause_s=5) as server,
        pytest.raises(UpstreamError, match="did not answer in time"),
    ):
        ask(server)


def test_a_server_that_never_ends_its_list_of_models_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_backend, "LIST_S", 0.2)

    async def drip(server: ChatServer, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.01)

    monkeypatch.setattr(ChatServer, "list_models", drip)
    with chat_server(lambda body: []) as server, pytest.raises(UpstreamError, match="did not answer in time"):
        ask(server)


def test_leaving_an_answer_ends_the_request() -> None:
    async def run(server: ChatServer) -> None:
        backend = await HttpBackend.connect(server.url, None, None)
        answer: AsyncGenerator[Any, None] = backend.stream(QUESTION, {}, [])
        await anext(answer)
        await answer.aclose()
        await backend.close()

    with chat_server(lambda body: ["x"] * 1000, pause_s=0.01) as server:
        asyncio.run(asyncio.wait_for(run(server), 5))


def test_raw_shows_the_body_and_not_the_key() -> None:
    async def run(server: ChatServer) -> str:
        backend = await HttpBackend.connect(server.url, "sk-secret", None)
        raw = backend.raw(QUESTION, {}, [])
        await backend.close()
        return raw.text

    with chat_server(lambda body: []) as server:
        text = asyncio.run(run(server))
    assert '"content": "hi"' in text
    assert "sk-secret" not in text


def test_events_over_any_chunk_boundaries() -> None:
    stream = b'data: {"a": 1}\r\n\r\n: comment\nevent: x\ndata: two\r\ndata:lines\r\n\r\n\n\ndata: [DONE]\r\rid: 7\n\n'
    events = ['{"a": 1}', "two\nlines", "[DONE]"]
    source = random.Random(3)
    for _ in range(300):
        parser, rest = EventParser(), stream
        found: list[str] = []
        while rest:
            size = source.randint(1, 20)
            found += parser.push(rest[:size])
            rest = rest[size:]
        assert found == events


def test_an_endless_event_is_refused() -> None:
    parser = EventParser()
    assert list(parser.push(b"x" * 2**20)) == []
    with pytest.raises(UpstreamError, match="is the URL right"):
        list(parser.push(b"x"))


def test_tool_calls_come_in_pieces() -> None:
    chunks = AnswerChunks()
    deltas: list[dict[str, Any]] = [
        {"tool_calls": [{"index": 0, "id": "c0", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 1, "id": "c1", "function": {"name": "g", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    for delta in deltas:
        assert chunks.push(json.dumps({"choices": [{"delta": delta}]})) == ""
    chunks.push(json.dumps({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}))
    end = chunks.end(0.0, 1.0)
    assert end.finish_reason == "tool_calls"
    assert [(c.id, c.name, c.arguments) for c in end.tool_calls] == [("c0", "f", '{"a": 1}'), ("c1", "g", "{}")]


@pytest.mark.parametrize(
    "data",
    [
        "no json",
        "[]",
        "3",
        '{"choices": 3}',
        '{"choices": [3]}',
        '{"choices": [{"delta": {"tool_calls": [{}]}}]}',
        '{"choices": [], "usage": 3}',
        '{"choices": ' + "[" * 100_000,
    ],
)
def test_what_is_no_chunk_is_an_error(data: str) -> None:
    with pytest.raises(UpstreamError, match="no chunk"):
        AnswerChunks().push(data)


def test_an_error_event_ends_the_answer() -> None:
    with pytest.raises(UpstreamError, match="ended the answer: engine died"):
        AnswerChunks().push('{"error": {"message": "engine died"}}')
