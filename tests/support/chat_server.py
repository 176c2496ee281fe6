"""A server of OpenAI's chat API whose answers a test decides, in a thread of this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

WAIT_S = 10.0
Answer = Callable[[Mapping[str, Any]], Sequence[str] | web.Response]


@dataclass
class ChatServer:
    """`answer` gives, for a request's body, the pieces of text to stream, or a response of its own.

    A piece is sent `pause_s` after the one before it. `bodies` and `headers` are those of every request.
    """

    answer: Answer
    pause_s: float = 0.0
    break_off: bool = False  # after the last piece, without an end
    models: Sequence[Mapping[str, Any]] = ({"id": "test-model", "max_model_len": 4096},)
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)

    async def list_models(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        return web.json_response({"object": "list", "data": list(self.models)})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        body = await request.json()
        self.bodies.append(body)
        pieces = self.answer(body)
        if isinstance(pieces, web.Response):
            return pieces
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await asyncio.sleep(self.pause_s)
            await response.write(_event({"choices": [{"index": 0, "delta": {"content": piece}}]}))
        if self.break_off:
            return response
        await response.write(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
        usage = {
            "prompt_tokens": 10 * len(body["messages"]),
            "completion_tokens": len(pieces),
            "prompt_tokens_details": {"cached_tokens": 7},
        }
        await response.write(_event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


@contextmanager
def chat_server(answer: Answer, **options: Any) -> Iterator[ChatServer]:
    """Serve while the block runs; `url` is the base that a client is given."""
    server = ChatServer(answer, **options)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        runner = asyncio.run_coroutine_threadsafe(_start(server), loop).result(WAIT_S)
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(WAIT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


async def _start(server: ChatServer) -> web.AppRunner:
    app = web.Application()
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/v1/chat/completions", server.complete)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    return runner
