"""From a request's body to what the engine runs, without holding up the event loop.

A large body is parsed and tokenised in a thread; how many bytes of such bodies are held at once is bounded, and so is
how long a client may take to send one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import hdrs, web

from corellm.errors import InvalidRequestError
from corellm.openai_api.json_object import NotAnObjectError, json_object
from corellm.openai_server.errors import HttpError, body_too_large, over_capacity

INLINE_BYTES = 8 << 10  # bodies up to here cost less than a change of thread
HELD_BYTES = 256 << 20
WORK_S = 60.0  # for a body to be parsed and tokenised, those before it included: megabytes of text take many seconds
THREADS = 2  # tokenizers let the interpreter go, parsing does not: more would only keep the event loop waiting

T = TypeVar("T")
Prompts = Sequence[Sequence[int]]


class ByteBudget:
    """A bound on bytes held at once; those who wait are served in order."""

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes, at most all that there are, for the length of the block."""
        size = min(size, self._total)
        await self._take(size)
        try:
            yield
        finally:
            self._give(size)

    async def _take(self, size: int) -> None:
        if not self._waiting and size <= self._free:
            self._free -= size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(size)  # it was ours already
            else:
                with contextlib.suppress(ValueError):  # a giver may have met it, and passed it over
                    self._waiting.remove((size, turn))
                self._give(0)  # whoever stood behind us may fit
            raise

    def _give(self, size: int) -> None:
        self._free += size
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= wanted
                turn.set_result(None)


@dataclass(frozen=True, slots=True)
class Intake:
    """Reads bodies of at most `max_body` bytes, each within `body_s` seconds."""

    max_body: int
    body_s: float
    budget: ByteBudget
    threads: ThreadPoolExecutor

    @classmethod
    def make(cls, max_body: int, body_s: float) -> Intake:
        return cls(max_body, body_s, ByteBudget(HELD_BYTES), ThreadPoolExecutor(THREADS, "corellm-intake"))

    async def take(self, request: web.Request, work: Callable[[dict[str, Any]], T]) -> T:
        """What `work` makes of the JSON object in the body.

        Raises `HttpError` for a body that does not come, is too long or has the wrong type, `InvalidRequestError` for
        one that is no JSON object, and what `work` raises.
        """
        _check_type(request)
        length = request.content_length
        if length is not None and length > self.max_body:
            raise body_too_large(self.max_body)
        if length is not None and length <= INLINE_BYTES:
            return work(_parse(await self._read(request)))
        async with self._room(length or self.max_body):
            data = await self._read(request)
            return await self._in_thread(lambda: work(_parse(data)))

    @contextlib.asynccontextmanager
    async def _room(self, size: int) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self.body_s):
                    await held.enter_async_context(self.budget.hold(size))
            except TimeoutError:
                raise _too_many() from None
            yield

    async def _in_thread(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(WORK_S):
                return await loop.run_in_executor(self.threads, work)
        except TimeoutError:
            raise _too_many() from None

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self.body_s):
                return await request.read()
        except TimeoutError:
            raise HttpError(
                408, f"the body did not arrive within {self.body_s:g} s; send it at once", code="request_timeout"
            ) from None
        except web.HTTPRequestEntityTooLarge:
            raise body_too_large(self.max_body) from None
        except web.RequestPayloadError:
            raise HttpError(400, "the body is damaged: its chunks or its length do not hold; send it again") from None

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)


def _too_many() -> HttpError:
    return over_capacity("too many long requests are being read; try again later")


def _check_type(request: web.Request) -> None:
    """A page of another site may send a form without asking first, but not JSON: so nothing else is taken."""
    if request.content_type != "application/json":
        raise HttpError(400, f"content-type is {request.content_type!r}; it must be 'application/json'")
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity")
    if encoding.lower() != "identity":
        raise HttpError(400, f"content-encoding is {encoding[:80]!r}; send the body as it is")


def _parse(data: bytes) -> dict[str, Any]:
    try:
        return json_object(data, "the body")
    except NotAnObjectError as error:
        raise InvalidRequestError(str(error)) from None
