"""Streams over real sockets: equal to whole answers, ended when the client leaves, honest when the engine dies."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from corellm.errors import EngineDeadError
from corellm.openai_api.responses import response_body
from corellm.openai_server import answers
from tests.support.serving import Served, StreamingEngine, served, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "n": 2, "logprobs": True, "top_logprobs": 1, "seed": 1},
    COMPLETIONS: {"prompt": ["one", "two"], "n": 2, "logprobs": 1, "seed": 1},
}


def run(test: Callable[[Served], Awaitable[None]], pace: float = 0.0, **options: Any) -> None:
    async def work() -> None:
        async with served(StreamingEngine(pace=pace), **options) as server:
            await test(server)

    asyncio.run(asyncio.wait_for(work(), 30))


def text_of(part: dict[str, Any]) -> str:
    found: str = part["delta"].get("content", "") if "delta" in part else part["text"]
    return found


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_says_what_the_whole_answer_says(path: str) -> None:
    async def test(server: Served) -> None:
        body = {**BODIES[path], "stream_options": {"include_usage": True}, "stream": True}
        events = await server.events(path, body)
        assert events.pop() == "[DONE]"
        assert events[-1]["choices"] == []
        _, whole = await server.post(path, BODIES[path])
        for choice in whole["choices"]:
            parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert "".join(map(text_of, parts)) == text
            assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert events[-1]["usage"] == whole["usage"]
        assert len({event["id"] for event in events}) == 1
        assert len(server.engine.calls) == 2 * len(whole["choices"])

    run(test)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_log_probabilities_are_written_down_beside_the_event_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def recorded(*arguments: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return response_body(*arguments)

    monkeypatch.setattr(answers, "response_body", recorded)

    async def test(server: Served) -> None:
        status, whole = await server.post(path, BODIES[path])
        assert status == 200
        assert all(choice["logprobs"] for choice in whole["choices"])

    run(test)
    assert threading.main_thread() not in threads
    assert len(threads) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_at_once(path: str, stream: bool) -> None:
    async def test(server: Served) -> None:
        server.engine._delay = lambda prompt: 60
        data = json.dumps({**BODIES[path], "stream": stream}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        for _ in range(3):
            async with server.connection(head.encode() + data):
                await until(lambda: server.engine.running > 0)
            await until(lambda: server.engine.running == 0, seconds=1)
        await until(lambda: server.state.open_answers == 0, seconds=1)

    run(test, pace=60)


def test_a_client_that_leaves_in_the_middle_of_its_stream_ends_it() -> None:
    async def test(server: Served) -> None:
        async with server.session.post(CHAT, json={**BODIES[CHAT], "stream": True}) as response:
            await response.content.readline()
            assert server.engine.running == 2
        await until(lambda: server.engine.running == 0 and server.engine.closed == 2, seconds=1)

    run(test, pace=0.2)


def test_the_death_of_the_engine_is_the_last_event_of_every_stream() -> None:
    async def test(server: Served) -> None:
        streams = [asyncio.create_task(server.events(path, BODIES[path])) for path in (CHAT, COMPLETIONS) * 5]
        await until(lambda: server.engine.running == 30)
        await asyncio.sleep(0.15)
        server.engine.dies(EngineDeadError("worker 0 was killed by SIGKILL"))
        for stream in streams:
            events = await stream
            assert events[-1]["error"] == {
                "message": "worker 0 was killed by SIGKILL", "type": "service_unavailable_error", "param": None,
                "code": "engine_dead",
            }  # fmt: skip
            assert "choices" in events[-2]
        assert server.state.open_answers == 0

    run(test, pace=0.1)


def test_a_prompt_alone_has_no_answer_whole_or_streamed() -> None:
    body = {"prompt": ["one", "two"], "echo": True, "max_tokens": 0, "logprobs": 1}

    async def test(server: Served) -> None:
        status, whole = await server.post(COMPLETIONS, body)
        assert status == 200
        assert [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]] == [
            ("one", "length"), ("two", "length"),
        ]  # fmt: skip
        assert whole["usage"]["completion_tokens"] == 0
        events = await server.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        assert events.pop() == "[DONE]"
        assert events[-1]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
            assert "".join(map(text_of, parts)) == choice["text"]

    run(test)


def test_an_error_of_one_choice_ends_the_others() -> None:
    async def work() -> None:
        calls = 0

        def second_fails(prompt: str) -> Any:
            nonlocal calls
            calls += 1
            return EngineDeadError("gone") if calls == 2 else None

        async with served(StreamingEngine(pace=5, failure=second_fails)) as server:
            async with asyncio.timeout(2):
                assert (await server.post(COMPLETIONS, {"prompt": "x", "n": 2, "stream": True}))[0] == 503
            assert server.engine.running == 0

    asyncio.run(work())


def test_the_tokens_of_a_slow_loop_are_not_lost() -> None:
    """Hundreds of streams at once, each complete and in order."""

    async def test(server: Served) -> None:
        async def one(number: int) -> None:
            prompt = f"number {number}"
            events = await server.events(COMPLETIONS, {"prompt": prompt, "max_tokens": 100})
            assert events.pop() == "[DONE]"
            assert "".join(text_of(event["choices"][0]) for event in events) == f"<{prompt}>"

        await asyncio.gather(*(one(number) for number in range(200)))

    run(test)


def test_priority_salt_and_seeds_reach_the_engine() -> None:
    async def test(server: Served) -> None:
        await server.post(COMPLETIONS, {"prompt": "x", "n": 2, "seed": 5, "priority": 3, "cache_salt": "s"})
        await server.events(COMPLETIONS, {"prompt": "x"})
        told = [(params.seed, priority, salt) for _, params, priority, salt in server.engine.calls]
        assert told == [(5, 3, "s"), (6, 3, "s"), (None, 0, "")]

    run(test)


def test_health_answers_while_long_prompts_are_read() -> None:
    """A prompt of a megabyte is parsed and tokenised beside the event loop."""

    async def test(server: Served) -> None:
        def slow(prompt: Any) -> list[int]:
            time.sleep(0.5)  # a tokenizer that lets other threads run
            return [1]

        server.engine.encode_prompt = slow  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        began = loop.time()
        posts = [asyncio.create_task(server.post(COMPLETIONS, {"prompt": "x" * 1_000_000})) for _ in range(4)]
        await asyncio.sleep(0.2)
        for _ in range(20):
            assert (await server.get("/health"))[0] == 200
        assert loop.time() - began < 0.8  # the four take 1 s, two at a time
        assert [(await post)[0] for post in posts] == [200] * 4

    run(test)
