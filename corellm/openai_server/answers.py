"""Token ids to answers: a whole body, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from corellm.openai_api.chunks import StreamedAnswer
from corellm.openai_api.requests import ChatRequest, CompletionRequest
from corellm.openai_api.responses import Head, response_body
from corellm.openai_api.results import TokenBytes
from corellm.openai_server.engine_api import Engine
from corellm.openai_server.errors import INTERNAL, as_http
from corellm.openai_server.intake import Prompts
from corellm.openai_server.observe import Observer, note
from corellm.text_engine import Completion

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


class Answering:
    """One parsed request on its way: its prompts, each answered `n` times, prompt-major."""

    def __init__(
        self,
        http: web.Request,
        engine: Engine,
        observer: Observer,
        request: ChatRequest | CompletionRequest,
        prompts: Prompts,
        head: Head,
    ) -> None:
        self._http, self._engine, self._observer = http, engine, observer
        self._request, self._prompts, self._head = request, prompts, head
        self._n = request.generation.n
        self._token_bytes: TokenBytes = engine.tokenizer.token_bytes if engine.tokenizer is not None else _nameless

    @property
    def answers(self) -> int:
        return len(self._prompts) * self._n

    async def respond(self) -> web.StreamResponse:
        """Answer it in the form that it asks for. Being cancelled aborts what runs of it."""
        return await (self._stream() if self._request.generation.stream else self._whole())

    # ---- whole ----------------------------------------------------------------------------------------------------

    async def _whole(self) -> web.Response:
        async with _first_error(), asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._complete(index)) for index in range(self.answers)]
        done = [task.result() for task in tasks]
        groups = [done[start : start + self._n] for start in range(0, len(done), self._n)]
        params = self._request.generation.params
        if params.logprobs is None and params.prompt_logprobs is None:
            return json_response(self._body(groups))
        # Tens of microseconds a token: the event loop has others to serve.
        return json_response(await asyncio.to_thread(self._body, groups))

    def _body(self, groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        return response_body(self._request, self._head, groups, self._token_bytes)

    async def _complete(self, index: int) -> Completion:
        generation = self._request.generation
        completion = await self._engine.complete(
            self._prompts[index // self._n],
            generation.choice_params(index % self._n),
            priority=generation.priority or 0,
            cache_salt=generation.cache_salt,
        )
        self._observer.answered(completion)
        self._note(completion.prompt_tokens, completion.output_tokens)
        return completion

    def _note(self, prompt_tokens: int, output_tokens: int) -> None:
        note(self._http, prompt_tokens, 0 if self._request.generation.prompt_only else output_tokens)

    # ---- streamed -------------------------------------------------------------------------------------------------

    async def _stream(self) -> web.StreamResponse:
        chunks = StreamedAnswer(self._request, self._head, self._token_bytes, [len(prompt) for prompt in self._prompts])
        events = EventStream(self._http)
        try:
            async with _first_error(), asyncio.TaskGroup() as group:
                for index in range(self.answers):
                    group.create_task(self._stream_choice(index, chunks, events))
            await events.send(chunks.finish())
            await events.done()
        except ConnectionError:
            pass  # the client is gone: nobody is left to tell
        except Exception as error:
            if not events.begun:
                raise
            self._observer.failed(self._http, error)
            await events.fail(error)
        return events.response

    async def _stream_choice(self, index: int, chunks: StreamedAnswer, events: EventStream) -> None:
        generation = self._request.generation
        prompt = self._prompts[index // self._n]
        deltas = self._engine.stream(
            prompt,
            generation.choice_params(index % self._n),
            priority=generation.priority or 0,
            cache_salt=generation.cache_salt,
        )
        unread = len(prompt)  # not in the log line yet
        async with aclosing(deltas):
            async for delta in deltas:
                await events.send(chunks.push(index, delta))
                # As they go: a stream may be ended before its end, and its log line tells what was sent.
                self._note(unread, len(delta.token_ids))
                unread = 0
                if delta.end is not None:
                    self._observer.answered(delta.end)


class EventStream:
    """Server-sent events. The status goes out with the first of them: until then an error can still have its own."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._opening = asyncio.Lock()
        self.response = web.StreamResponse(headers=_SSE_HEADERS)

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, chunks: Iterable[dict[str, Any]]) -> None:
        """Send each chunk as an event, all in one write. Waits while the client does not read.

        Raises `ConnectionError` when it is gone.
        """
        await self._write(b"".join([b"data: %b\n\n" % msgspec.json.encode(chunk) for chunk in chunks]))

    async def done(self) -> None:
        await self._write(b"data: [DONE]\n\n")

    async def fail(self, error: Exception) -> None:
        """The error as the last event; the end of the stream is not marked as one."""
        try:
            await self.send([(as_http(error) or INTERNAL).body])
        except ConnectionError:
            return
        self.response.force_close()

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        if not self.begun:
            async with self._opening:
                if not self.begun:
                    await self.response.prepare(self._request)
        await self.response.write(data)


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")


@asynccontextmanager
async def _first_error() -> AsyncIterator[None]:
    """Of a task group's errors, raise the first: one is what a client can be told."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def _nameless(token_id: int) -> bytes:
    """How a token is written when there is no tokenizer."""
    return b"token_id:%d" % token_id
