"""The HTTP side of the server: who may ask, what is refused with which status, what is told of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from corellm.comms.messages import Progress
from corellm.errors import EngineDeadError, NumericalError, OptionError, OverloadedError, RequestAbortedError
from corellm.logs import JsonFormatter, TextFormatter
from corellm.openai_server.options import ServerOptions, is_loopback, read_keys
from tests.support.serving import Served, StreamingEngine, served, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"prompt": "hello"}


@pytest.fixture(autouse=True)
def _logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytest would have it, also after a test of the command line."""
    monkeypatch.setattr(logging.getLogger("corellm"), "propagate", True)


def run(test: Callable[[Served], Awaitable[None]], **options: Any) -> None:
    async def work() -> None:
        async with served(**options) as server:
            await test(server)

    asyncio.run(asyncio.wait_for(work(), 30))


def error_of(answer: tuple[int, Any]) -> tuple[int, str, str | None, str | None]:
    """(status, type, param, code) of an error body, which must have exactly OpenAI's four fields."""
    status, body = answer
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    return status, body["error"]["type"], body["error"]["param"], body["error"]["code"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, b"{", (400, "invalid_request_error", None, None)),
        (CHAT, b"\xff", (400, "invalid_request_error", None, None)),
        (CHAT, b"[1]", (400, "invalid_request_error", None, None)),
        (CHAT, b"", (400, "invalid_request_error", None, None)),
        (CHAT, b"[" * 5000, (400, "invalid_request_error", None, None)),
        (CHAT, {}, (400, "invalid_request_error", "messages", None)),
        (CHAT, {**HELLO, "temperature": 3}, (400, "invalid_request_error", "temperature", None)),
        (CHAT, {**HELLO, "colour": 1}, (400, "invalid_request_error", "colour", None)),
        (CHAT, {"messages": [{"role": "king"}]}, (400, "invalid_request_error", "messages[0].role", None)),
        (CHAT, {**HELLO, "model": "other"}, (404, "invalid_request_error", None, "model_not_found")),
        (COMPLETIONS, {"prompt": ""}, (400, "invalid_request_error", "prompt", None)),
        (COMPLETIONS, {"prompt": [256]}, (400, "invalid_request_error", "prompt", None)),
        (COMPLETIONS, {"prompt": "x" * 200}, (400, "invalid_request_error", "prompt", "context_length_exceeded")),
        (
            COMPLETIONS,
            {"prompt": "x" * 20_000},  # long enough to be tokenised in a thread
            (400, "invalid_request_error", "prompt", "context_length_exceeded"),
        ),
        ("/tokenize", {}, (400, "invalid_request_error", "prompt", None)),
        ("/detokenize", {"tokens": [999]}, (400, "invalid_request_error", "tokens", None)),
    ],
)  # fmt: skip
def test_a_bad_body_is_refused_by_name(path: str, body: Any, expected: tuple[Any, ...]) -> None:
    async def test(server: Served) -> None:
        assert error_of(await server.post(path, body)) == expected
        assert error_of(await server.post(path, body, chunked=True)) == expected
        assert server.engine.calls == []

    run(test)


def test_an_over_long_prompt_is_refused_with_both_numbers() -> None:
    async def test(server: Served) -> None:
        _, body = await server.post(COMPLETIONS, {"prompt": "x" * 190, "max_tokens": 11})
        assert "190" in body["error"]["message"]
        assert "200" in body["error"]["message"]

    run(test)


def test_unknown_paths_and_methods_are_refused_in_the_same_shape() -> None:
    async def test(server: Served) -> None:
        assert error_of(await server.get(URL("/no%0Awhere", encoded=True)))[0] == 404
        assert error_of(await server.get("/nowhere")) == (404, "invalid_request_error", None, "not_found")
        assert error_of(await server.get(CHAT)) == (405, "invalid_request_error", None, "method_not_allowed")

    run(test)


def test_what_is_not_http_is_refused_in_the_same_shape() -> None:
    async def test(server: Served) -> None:
        for request in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"):
            head, body = (await server.exchange(request)).split(b"\r\n\r\n")
            assert b" 400 " in head.splitlines()[0]
            assert b"Server: corellm" in head.splitlines()
            assert error_of((400, json.loads(body)))[1] == "invalid_request_error"

    run(test)


def test_damaged_bodies_are_refused_without_a_word_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

    async def test(server: Served) -> None:
        for rest in (
            "Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
            "Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
        ):
            assert b" 400 " in (await server.exchange((head + rest).encode())).splitlines()[0]

    with caplog.at_level(logging.INFO, "corellm.server"):
        run(test)
    assert [record for record in caplog.records if record.name == "corellm.server"] == []


def test_a_body_that_is_not_called_json_is_refused() -> None:
    """A page of another site can send a form to this machine without being asked, but not JSON."""

    async def test(server: Served) -> None:
        answer = await server.post(CHAT, HELLO, headers={"Content-Type": "text/plain"})
        assert error_of(answer)[0] == 400
        assert "application/json" in answer[1]["error"]["message"]

    run(test)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_is_413(chunked: bool) -> None:
    def padded(size: int) -> bytes:
        return json.dumps(PROMPT).encode().ljust(size)

    async def test(server: Served) -> None:
        assert (await server.post(COMPLETIONS, padded(2048), chunked=chunked))[0] == 200
        answer = await server.post(COMPLETIONS, padded(2049), chunked=chunked)
        assert error_of(answer)[0] == 413
        assert "2048" in answer[1]["error"]["message"]
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
        assert b" 413 " in await server.exchange(head.encode())  # at once: nothing of the body has come

    run(test, max_body=2048)


def test_keys() -> None:
    async def test(server: Served) -> None:
        for headers in (
            {},
            {"Authorization": "Bearer three"},
            {"Authorization": "Basic one"},
            {"Authorization": "one"},
        ):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
                assert error_of(await server.get(path, headers=headers)) == (
                    401, "invalid_request_error", None, "invalid_api_key",
                )  # fmt: skip
            assert (await server.post(CHAT, HELLO, headers=headers))[0] == 401
        for key in ("one", "two"):
            assert (await server.get("/v1/models", headers={"Authorization": f"Bearer {key}"}))[0] == 200
        assert (await server.get("/health"))[0] == 200
        assert server.engine.calls == []

    run(test, api_keys=("one", "two"))


def test_other_sites_pages_are_let_in_only_when_named() -> None:
    good, bad = "https://good.example", "https://bad.example"
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-os",
    }

    async def test(server: Served) -> None:
        for origin, allowed in ((good, good), (bad, None)):
            async with server.session.options(CHAT, headers={"Origin": origin, **preflight}) as response:
                assert response.status == 204
                assert response.headers.get("Access-Control-Allow-Origin") == allowed
                assert response.headers["Access-Control-Allow-Headers"] == "authorization,x-os"
            headers = {"Origin": origin, "Authorization": "Bearer k"}
            async with server.session.post(CHAT, json={**HELLO, "stream": True}, headers=headers) as response:
                assert response.status == 200
                assert response.headers.get("Access-Control-Allow-Origin") == allowed

    run(test, cors_origins=(good,), api_keys=("k",))

    async def closed(server: Served) -> None:
        async with server.session.options(CHAT, headers={"Origin": good, **preflight}) as response:
            assert response.status == 405
            assert "Access-Control-Allow-Origin" not in response.headers

    run(closed)


def test_request_ids_come_back_and_bad_ones_are_replaced() -> None:
    async def test(server: Served) -> None:
        for given, kept in (("abc-1.2:3", True), ("a b", False), ("x" * 129, False), ("", False)):
            for path in ("/health", "/nowhere"):
                async with server.session.get(path, headers={"X-Request-Id": given}) as response:
                    assert (response.headers["X-Request-Id"] == given) is kept
        async with server.session.post(CHAT, json={**HELLO, "stream": True}, headers={"X-Request-Id": "s"}) as response:
            assert response.headers["X-Request-Id"] == "s"

    run(test)


def test_health_follows_the_server() -> None:
    async def test(server: Served) -> None:
        server.state.report(Progress(stage="read weights", done=3, total=9, unit="B"))
        status, body = await server.get("/health")
        assert (status, body["status"], body["stage"], body["done"]) == (503, "starting", "read weights", 3)
        assert error_of(await server.post(CHAT, HELLO)) == (503, "service_unavailable_error", None, "starting")
        server.state.serve(server.engine)
        assert await server.get("/health") == (200, {"status": "ok"})
        assert (await server.post(CHAT, HELLO))[0] == 200
        server.state.drain()
        assert (await server.get("/health"))[1]["status"] == "draining"
        assert error_of(await server.post(CHAT, HELLO)) == (503, "service_unavailable_error", None, "shutting_down")
        server.state.fail(EngineDeadError("worker 0 was killed"))
        assert await server.get("/health") == (503, {"status": "dead", "reason": "worker 0 was killed"})
        assert error_of(await server.post(CHAT, HELLO)) == (503, "service_unavailable_error", None, "engine_dead")

    run(test, ready=False)


def test_over_capacity_is_429_and_what_could_never_fit_400() -> None:
    async def test(server: Served) -> None:
        server.engine._delay = lambda prompt: 0.3
        first = asyncio.create_task(server.post(COMPLETIONS, {**PROMPT, "n": 2}))
        await asyncio.sleep(0.1)
        assert error_of(await server.post(COMPLETIONS, {**PROMPT, "n": 2})) == (
            429, "rate_limit_error", None, "over_capacity",
        )  # fmt: skip
        assert (await server.post(COMPLETIONS, PROMPT))[0] == 200
        assert (await first)[0] == 200
        for never, param in (
            ({**PROMPT, "n": 4}, "n"),
            ({"prompt": ["x"] * 4}, "prompt"),
            ({"prompt": ["x"] * 2, "n": 2}, "prompt"),
        ):
            answer = await server.post(COMPLETIONS, never)
            assert error_of(answer) == (400, "invalid_request_error", param, None)
            assert answer[1]["error"]["message"].startswith("n asks for 4" if param == "n" else "prompt holds ")
        assert (await server.post(COMPLETIONS, {**PROMPT, "n": 3}))[0] == 200

    run(test, max_concurrent=3)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NumericalError("the logits are NaN"), (500, "server_error", None, "nan_logits")),
        (OverloadedError("busy"), (429, "rate_limit_error", None, "over_capacity")),
        (EngineDeadError("killed"), (503, "service_unavailable_error", None, "engine_dead")),
        (RequestAbortedError("aborted"), (503, "service_unavailable_error", None, "shutting_down")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_its_status(error: Any, expected: Any, stream: bool) -> None:
    async def work() -> None:
        async with served(StreamingEngine(failure=lambda prompt: error)) as server:
            assert error_of(await server.post(COMPLETIONS, {**PROMPT, "stream": stream, "n": 2})) == expected

    asyncio.run(work())


def test_a_bug_is_500_and_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    bug: Any = ZeroDivisionError("secret detail")

    async def work() -> None:
        async with served(StreamingEngine(failure=lambda prompt: bug)) as server:
            status, body = await server.post(CHAT, HELLO)
            assert (status, body["error"]["type"]) == (500, "server_error")
            assert "secret" not in json.dumps(body)

    with caplog.at_level(logging.ERROR, "corellm.server"):
        asyncio.run(work())
    assert "ZeroDivisionError" in caplog.text


def test_models() -> None:
    async def test(server: Served) -> None:
        _, listed = await server.get("/v1/models")
        assert [card["id"] for card in listed["data"]] == ["org/llama", "llama"]
        assert (await server.get("/v1/models/org/llama"))[1]["max_model_len"] == 200
        assert (await server.get("/v1/models/org%2Fllama"))[1] == listed["data"][0]
        assert error_of(await server.get("/v1/models/gpt"))[3] == "model_not_found"
        for name in ("org/llama", "llama"):
            assert (await server.post(CHAT, {**HELLO, "model": name}))[1]["model"] == name
        assert (await server.post(CHAT, HELLO))[1]["model"] == "org/llama"

    run(test, served_model_names=("org/llama", "llama"))


def test_tokens_and_text() -> None:
    async def test(server: Served) -> None:
        _, body = await server.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
        assert body == {"count": 3, "max_model_len": 200, "tokens": [104, 195, 169], "token_strs": ["h", "�", "�"]}
        assert (await server.post("/detokenize", {"tokens": body["tokens"]}))[1] == {"prompt": "hé"}
        _, chat = await server.post("/tokenize", HELLO)
        assert bytes(chat["tokens"]) == b"user:hello|assistant:"
        assert chat["token_strs"] is None

    run(test)


def test_metrics_have_engine_and_server_figures() -> None:
    async def test(server: Served) -> None:
        await server.post(CHAT, {**HELLO, "n": 2})
        await server.post(CHAT, {})
        async with server.session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        model = 'model_name="fake-model"'
        for expected in (
            f"corellm:num_requests_running{{{model}}} 2.0",
            f"corellm:num_requests_waiting{{{model}}} 3.0",
            f"corellm:kv_cache_usage_perc{{{model}}} 0.4",
            f"corellm:generation_tokens_total{{{model}}} 13.0",
            f"corellm:prefix_cache_hits_total{{{model}}} 7.0",
            f'corellm:request_success_total{{finished_reason="stop",{model}}} 2.0',
            f"corellm:time_to_first_token_seconds_count{{{model}}} 2.0",
            f'corellm:http_requests_total{{handler="{CHAT}",method="POST",status="200"}} 1.0',
            f'corellm:http_requests_total{{handler="{CHAT}",method="POST",status="400"}} 1.0',
        ):
            assert expected in lines

    run(test)


@contextlib.contextmanager
def access_records() -> Iterator[list[logging.LogRecord]]:
    """What the access log is told."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("corellm.access")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def test_the_access_log_tells_everything_but_prompts() -> None:
    async def test(server: Served) -> None:
        await server.post(COMPLETIONS, {"prompt": "a secret", "n": 2}, headers={"X-Request-Id": "r1"})
        await server.post(COMPLETIONS, {"prompt": ["a secret"], "n": 0}, headers={"X-Request-Id": "r2"})
        await server.get("/health")
        await server.get(URL("/v1/x%0Ay", encoded=True), headers={"X-Request-Id": "r3"})

    with access_records() as records:
        run(test)
    lines = [json.loads(JsonFormatter().format(record)) for record in records]
    told = [(line["request_id"], line["status"], line["prompt_tokens"], line["output_tokens"]) for line in lines]
    assert told == [("r1", 200, 16, 20), ("r2", 400, 0, 0), ("r3", 404, 0, 0)]
    assert lines[0]["path"] == COMPLETIONS
    assert lines[1]["error"] == "invalid_request_error"
    assert "secret" not in json.dumps(lines) + "".join(record.getMessage() for record in records)
    for record in records:
        assert "\n" not in JsonFormatter().format(record) + TextFormatter().format(record)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("how", ["it ends", "the engine dies", "the client leaves"])
def test_the_access_log_tells_what_a_stream_sent_however_it_ended(path: str, how: str) -> None:
    """Tokens are bytes here, and the fake engine sends one in each event."""
    body = {**(HELLO if path == CHAT else PROMPT), "n": 2, "stream": True}
    prompt = "user:hello|assistant:" if path == CHAT else "hello"
    sent = 0

    async def test(server: Served) -> None:
        nonlocal sent
        async with server.session.post(path, json=body) as response:
            async for line in response.content:
                parts = json.loads(line[6:]).get("choices", []) if line.startswith(b"data: {") else []
                if not any(part.get("text") or part.get("delta", {}).get("content") for part in parts):
                    continue
                sent += 1
                if sent == 6 and how == "the engine dies":
                    server.engine.dies(EngineDeadError("killed"))
                elif sent == 6 and how == "the client leaves":
                    break
        await until(lambda: bool(records) and not server.state.open_answers)

    async def work() -> None:
        async with served(StreamingEngine(pace=0.05)) as server:
            await asyncio.wait_for(test(server), 30)

    with access_records() as records:
        asyncio.run(work())
    fields = records[-1].fields  # type: ignore[attr-defined]
    assert fields["prompt_tokens"] == 2 * len(prompt)
    # A client that leaves may have missed what was on its way.
    whole = 2 * (len(prompt) + 2)
    assert sent <= fields["output_tokens"] <= (whole - 1 if how == "the client leaves" else sent)
    assert sent == whole if how == "it ends" else 6 <= sent < whole


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_beyond_this_machine_a_key_is_needed(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(OptionError, match="--insecure"):
        ServerOptions(host=host)
    ServerOptions(host=host, insecure=True)
    ServerOptions(host=host, api_keys=("k",))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_on_this_machine_none_is_needed(host: str) -> None:
    ServerOptions(host=host)


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ({"port": 65536}, "--port"),
        ({"max_concurrent": 0}, "--max-concurrent"),
        ({"max_body": 1}, "--max-body"),
        ({"shutdown_grace": float("nan")}, "--shutdown-grace"),
        ({"api_workers": 0}, "--api-workers"),
        ({"log_format": "xml"}, "--log-format"),
        ({"api_keys": ("a b",)}, "--api-key"),
        ({"api_keys": ("",)}, "--api-key"),
        ({"served_model_names": ("",)}, "--served-model-name"),
        ({"cors_origins": ("example.org",)}, "--cors-origin"),
        ({"cors_origins": ("https://example.org/",)}, "--cors-origin"),
        ({"tls_cert": "c.pem"}, "--tls-cert"),
    ],
)
def test_options_out_of_range_are_named(option: dict[str, Any], flag: str) -> None:
    with pytest.raises(OptionError, match=flag):
        ServerOptions(**option)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\n\n  two \r\n", ("one", "two")),
        ("# team a\none\n  #c\n\t# two\r\n#\n", ("one",)),
        ("o#e\n", ("o#e",)),
        ("one # team a\n", None),
        ("#one\n", None),
        ("\n", None),
    ],
)
def test_a_key_file_has_keys_and_comments_and_nothing_else(tmp_path: Path, text: str, expected: Any) -> None:
    (tmp_path / "keys").write_text(text)
    if expected is not None:
        assert read_keys(str(tmp_path / "keys")) == expected
        return
    with pytest.raises(OptionError, match="on each line") as refused:
        read_keys(str(tmp_path / "keys"))
    assert "team" not in refused.value.message


def test_keys_are_not_in_what_options_print() -> None:
    assert "hush" not in repr(ServerOptions(api_keys=("hush",)))
