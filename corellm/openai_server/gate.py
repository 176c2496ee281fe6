"""Who may ask: API keys, and which other sites' pages."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from corellm.openai_server.errors import unauthorized

OPEN_PATHS = frozenset({"/health"})  # probes carry no key


class Keys:
    """Checks API keys in a time that says nothing of them. Without keys everyone may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def check(self, request: web.Request) -> None:
        """Raise `HttpError` 401 unless the request carries one of the keys."""
        if not self._digests or request.path in OPEN_PATHS:
            return
        scheme, _, key = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise unauthorized("there is no API key; send it as 'Authorization: Bearer KEY'")
        given = _digest(key.strip())
        # All are compared, so that the time does not tell which one it is.
        if not sum(hmac.compare_digest(given, known) for known in self._digests):
            raise unauthorized("the API key is not one of this server's; check it")


class Origins:
    """Tells browsers which other sites' pages may read the answers."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def is_preflight(self, request: web.Request) -> bool:
        return (
            bool(self._origins)
            and request.method == hdrs.METH_OPTIONS
            and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        )

    def preflight(self, request: web.Request) -> web.Response:
        """The answer to a browser that asks whether it may ask; `sign` adds whether it may."""
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "authorization, content-type")
        return web.Response(
            status=204,
            headers={
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: asked,
                hdrs.ACCESS_CONTROL_MAX_AGE: "600",
            },
        )

    async def sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """Mark a response that is about to begin as one that the asking page may read."""
        if not self._origins:
            return
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is not None and not self._origins.isdisjoint({origin, "*"}):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*" if "*" in self._origins else origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "X-Request-Id, Retry-After"


def gate(keys: Keys, origins: Origins) -> Middleware:
    """The middleware that lets through who may ask."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if origins.is_preflight(request):
            return origins.preflight(request)
        keys.check(request)
        return await handler(request)

    return check


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
