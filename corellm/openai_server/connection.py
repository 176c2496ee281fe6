"""Connections: how malformed ones are answered, and how those that do not read are closed.

aiohttp bounds how long a head may take (its keep-alive time runs from the connection on), and the routes bound how long
a body may take. What is left are clients that do not read their answer: a full buffer stops the writer for as long as
they like, and a closed transport lingers until its buffer is empty.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from corellm.openai_server.errors import INTERNAL, HttpError
from corellm.openai_server.observe import SERVER

SWEEP_S = 0.5

log = logging.getLogger("corellm.server")


class HttpProtocol(web.RequestHandler):
    """aiohttp's protocol of one connection, with errors that no route sees in OpenAI's shape too."""

    __slots__ = ()

    def log_exception(self, *args: Any, **options: Any) -> None:
        """aiohttp reports damaged bodies as if they were faults of the server."""
        if isinstance(options.get("exc_info"), web.RequestPayloadError):
            log.debug("a damaged body came")
        else:
            super().log_exception(*args, **options)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that is not HTTP. The connection is closed."""
        if request.writer.output_size > 0:
            raise ConnectionError("a response has begun; an error cannot follow it")
        if status == 400:
            log.debug("a malformed request came from %s", request.remote)
            text = " ".join((message or "").split())[:200]
            found = HttpError(400, f"the request is not well-formed HTTP: {text}")
        else:
            log.error("a request from %s failed", request.remote, exc_info=exc)
            found = INTERNAL
        response = web.Response(
            body=msgspec.json.encode(found.body),
            status=found.status,
            headers={"Server": SERVER},
            content_type="application/json",
        )
        response.force_close()
        return response


class WriteGuard(asyncio.Protocol):
    """Passes everything on to the protocol of one connection, and keeps the time since its writing stood still."""

    def __init__(self, inner: asyncio.Protocol, guards: set[WriteGuard]) -> None:
        self._inner, self._guards = inner, guards
        self._transport: asyncio.Transport | None = None
        self._stuck_since: float | None = None
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            self._guards.add(self)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guards.discard(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._paused = True
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._paused, self._stuck_since = False, None
        self._inner.resume_writing()

    def check(self, now: float, patience_s: float) -> None:
        """Cut the connection if writing has stood still, or closing has not ended, for `patience_s`."""
        if self._transport is None or not (self._paused or self._transport.is_closing()):
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since > patience_s:
            _cut(self._transport)


def _cut(transport: asyncio.Transport) -> None:
    """Reset the connection: without that, the kernel would go on to offer what it holds to a client that reads not."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class WriteGuards:
    """All connections of a listener: a protocol factory, and the sweep over what it made."""

    def __init__(self, factory: Callable[[], asyncio.Protocol], patience_s: float) -> None:
        self._factory, self._patience_s = factory, patience_s
        self._guards: set[WriteGuard] = set()

    def __call__(self) -> WriteGuard:
        return WriteGuard(self._factory(), self._guards)

    async def sweep(self) -> None:
        """Check every connection twice a second, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            for guard in list(self._guards):
                guard.check(loop.time(), self._patience_s)
