"""Sockets that keep the server waiting: closed on time, while others are served."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from corellm.openai_server import intake
from corellm.openai_server.intake import INLINE_BYTES, ByteBudget
from corellm.openai_server.options import Deadlines
from tests.support.serving import Served, StreamingEngine, served, until

SOCKETS = 50
SHORT = Deadlines(header_s=0.5, body_s=0.5, write_s=0.5)
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"


def run(test: Callable[[Served], Awaitable[None]], engine: Callable[[], StreamingEngine] = StreamingEngine) -> None:
    async def work() -> None:
        async with served(engine(), deadlines=SHORT) as server:
            await test(server)

    asyncio.run(asyncio.wait_for(work(), 30))


async def others_are_served(server: Served) -> None:
    for _ in range(5):
        assert (await server.post("/v1/completions", {"prompt": "x"}))[0] == 200


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ", b""),
        (HEAD.encode(), b"HTTP/1.1 408"),
        (HEAD.encode() + b'{"prompt": ', b"HTTP/1.1 408"),
        (HEAD.replace("/v1/completions", "/nowhere").encode() + b"x", b"HTTP/1.1 404"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200"),  # idle after an answer
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /he", b"HTTP/1.1 200"),
    ],
    ids=["silent", "head", "body", "part of a body", "unread body", "idle", "second head"],
)
def test_a_client_that_stops_sending_is_closed(sent: bytes, answered: bytes) -> None:
    async def test(server: Served) -> None:
        async def stall() -> None:
            assert (await server.exchange(sent)).startswith(answered)

        began = asyncio.get_running_loop().time()
        stalled = [asyncio.create_task(stall()) for _ in range(SOCKETS)]
        await others_are_served(server)
        await asyncio.gather(*stalled)
        assert 0.4 < asyncio.get_running_loop().time() - began < 4

    run(test)


class Talkative(StreamingEngine):
    """Answers with more than any socket's buffers hold."""

    async def stream(self, *arguments: Any, **options: Any) -> Any:
        self.running += 1
        try:
            async for delta in super().stream(*arguments, **options):
                for _ in range(200):
                    delta.text = "x" * 100_000
                    end, delta.end = delta.end, None
                    yield delta
                delta.end = end
                yield delta
        finally:
            self.running -= 1


def read_all(client: socket.socket) -> None:
    client.settimeout(5)
    while client.recv(1 << 20):
        pass


@pytest.mark.parametrize("closes", [False, True])
def test_a_client_that_does_not_read_is_cut_off_and_its_request_ended(closes: bool) -> None:
    async def test(server: Served) -> None:
        data = json.dumps({"prompt": "x", "stream": True}).encode()
        head = HEAD.replace("100", str(len(data)))
        if closes:
            head = head.replace("Host: x", "Host: x\r\nConnection: close")
        sockets = []
        for _ in range(20):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(head.encode() + data)
            sockets.append(client)
        await until(lambda: server.engine.running > 0)
        await until(lambda: server.engine.running == 0 and server.state.open_answers == 0, seconds=5)
        for client in sockets:
            with client, pytest.raises(ConnectionResetError):
                read_all(client)

    run(test, Talkative)


def test_a_slow_reader_gets_everything() -> None:
    async def test(server: Served) -> None:
        async with server.session.post("/v1/completions", json={"prompt": "x", "stream": True}) as response:
            size = 0
            async for piece in response.content.iter_chunked(1 << 20):
                size += len(piece)
                await asyncio.sleep(0.02)
        assert size > 3 * 200 * 100_000

    run(test, Talkative)


class Ponderous(StreamingEngine):
    """Tokenises as slowly as megabytes of text do."""

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        if len(prompt) > INLINE_BYTES:
            time.sleep(1.0)
        return super().encode_prompt(prompt)


def test_long_requests_are_refused_when_those_before_them_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "WORK_S", 0.2)

    async def test(server: Served) -> None:
        long = {"prompt": "x" * 2 * INLINE_BYTES}
        began = asyncio.get_running_loop().time()
        answers = [asyncio.create_task(server.post("/v1/completions", long)) for _ in range(2 * intake.THREADS)]
        await others_are_served(server)
        assert [(status, body["error"]["code"]) for status, body in await asyncio.gather(*answers)] == [
            (429, "over_capacity")
        ] * len(answers)
        assert asyncio.get_running_loop().time() - began < 0.9

    run(test, Ponderous)


def test_the_byte_budget_is_kept_in_order() -> None:
    async def work() -> None:
        budget = ByteBudget(10)
        held: list[int] = []

        async def hold(size: int, gate: asyncio.Event) -> None:
            async with budget.hold(size):
                held.append(size)
                await gate.wait()
            held.remove(size)

        gates = [asyncio.Event() for _ in range(5)]
        tasks = [asyncio.create_task(hold(size, gate)) for size, gate in zip([6, 5, 3, 99, 1], gates, strict=True)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert held == [6]  # 5 does not fit, and 3 stands behind it
        tasks[1].cancel()
        await asyncio.sleep(0.01)
        assert held == [6, 3]
        gates[0].set()
        gates[2].set()
        await asyncio.sleep(0.01)
        assert held == [99]  # more than there is: it takes all, alone
        tasks[3].cancel()
        await asyncio.sleep(0.01)
        assert held == [99, 1] or held == [1]
        gates[4].set()
        await asyncio.wait(tasks)
        async with asyncio.timeout(1), budget.hold(10):
            pass  # nothing was lost

    asyncio.run(work())
