"""The HTTP server in the test's own loop, over a fake engine that streams: real sockets, no model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import aiohttp
from yarl import URL

from corellm.comms.messages import KVStats, Stats
from corellm.errors import CoreLLMError
from corellm.openai_server.options import ServerOptions
from corellm.openai_server.server import HttpServer, bind, make_app
from corellm.openai_server.state import ServerState
from corellm.sampling_params import SamplingParams
from corellm.text_engine import Delta
from tests.support.fake_text_engine import ByteTokenizer, FakeTextEngine, answer

STATS = Stats(
    version=1, sequence=1, uptime_s=1.0, state="ready", model="fake-model", steps=5, running=2, waiting=3,
    kv=KVStats(total=100, free=50, in_use=40, cached=10, shared=0, evictions=0, hit_tokens=7, query_tokens=9),
    prompt_tokens=11, output_tokens=13, finished=1, aborted=4, failed=5, preemptions=6, last_prefill_tokens=0,
    last_decode_tokens=0, last_step_s=0.0,
)  # fmt: skip


class Utf8Tokenizer(ByteTokenizer):
    """Token ids are the bytes of UTF-8."""

    adds_bos = False

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


class StreamingEngine(FakeTextEngine):
    """Streams its answers token by token, `pace` seconds apart; `dies` ends it in the middle of everything."""

    tokenizer: Any

    def __init__(self, *, pace: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.tokenizer = Utf8Tokenizer()
        self.pace = pace
        self.closed = 0  # streams that were left before their end
        self._death: asyncio.Future[CoreLLMError] = asyncio.get_running_loop().create_future()

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> AsyncGenerator[Delta, None]:
        text = bytes(list(prompt)).decode()
        self.calls.append((text, params, priority, cache_salt))
        end = answer(text, params)
        done = False
        self.running += 1
        try:
            if (error := self._failure(text)) is not None:
                raise error
            for index, token in enumerate(end.token_ids):
                await asyncio.sleep(self.pace)
                if self._death.done():
                    raise self._death.result()
                delta = Delta(text=chr(token), token_ids=[token])
                if end.logprobs is not None:
                    delta.logprobs = [end.logprobs[index]]
                if index == len(end.token_ids) - 1:
                    delta.end, done = end, True
                yield delta
        finally:
            self.running -= 1
            self.closed += not done

    def dies(self, error: CoreLLMError) -> None:
        self._death.set_result(error)

    async def died(self) -> CoreLLMError:
        return await asyncio.shield(self._death)

    def abort_all(self) -> None:
        pass

    def latest_stats(self) -> Stats | None:
        return STATS


class Served:
    """A server that listens, and a client of it."""

    def __init__(self, state: ServerState, engine: StreamingEngine, port: int, session: aiohttp.ClientSession) -> None:
        self.state, self.engine, self.port, self.session = state, engine, port, session

    async def get(self, path: str | URL, **options: Any) -> tuple[int, Any]:
        async with self.session.get(path, **options) as response:
            return response.status, await response.json(content_type=None)

    async def post(self, path: str, body: Any, *, chunked: bool = False, **options: Any) -> tuple[int, Any]:
        """Send a body, JSON unless it is bytes; `chunked` leaves its length unsaid."""
        data: Any = body if isinstance(body, bytes) else json.dumps(body).encode()
        data = _pieces(data) if chunked else data
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        async with self.session.post(path, data=data, headers=headers, **options) as response:
            return response.status, await response.json(content_type=None)

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of every server-sent event; the end mark stays a string."""
        async with self.session.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            lines = (await response.text()).split("\n\n")
        assert lines.pop() == ""
        words = [line.removeprefix("data: ") for line in lines]
        return [word if word == "[DONE]" else json.loads(word) for word in words]

    @contextlib.asynccontextmanager
    async def connection(self, sent: bytes) -> AsyncIterator[asyncio.StreamReader]:
        """A connection over which `sent` has gone; closed when the block is left."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(sent)
            yield reader
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def exchange(self, sent: bytes) -> bytes:
        """Whatever comes back until the server closes the connection."""
        async with self.connection(sent) as reader:
            return await reader.read()


@contextlib.asynccontextmanager
async def served(engine: StreamingEngine | None = None, *, ready: bool = True, **options: Any) -> AsyncIterator[Served]:
    """A server with these options on a free port."""
    engine = engine or StreamingEngine()
    chosen = ServerOptions(port=0, **options)
    state = ServerState(chosen.max_concurrent)
    if ready:
        state.serve(engine)
    http = HttpServer(make_app(state, chosen, engine.latest_stats, lambda: engine.info.model), chosen)
    bound = bind(chosen)
    await http.start(bound)
    port = bound.getsockname()[1]
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield Served(state, engine, port, session)
    finally:
        await http.close()


async def until(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  there is nothing to wait for but time
            await asyncio.sleep(0.005)


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data[:7]
    yield data[7:]
