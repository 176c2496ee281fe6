"""What is told of each request: its id, its log line, its place in the metrics, its error in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
import re
from uuid import uuid4

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from corellm.logs import ACCESS
from corellm.openai_server.errors import INTERNAL, HttpError, as_http
from corellm.openai_server.metrics import Metrics
from corellm.text_engine import Completion

SERVER = "corellm"  # the header of that name: no versions in it
CLIENT_LEFT = 499  # nginx's own status for it

_REQUEST_ID = web.RequestKey("request_id", str)
_TOKENS = web.RequestKey("tokens", tuple[int, int])
_ERROR = web.RequestKey("error", str)
_GOOD_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

log = logging.getLogger("corellm.server")
access_log = logging.getLogger(ACCESS)


def note(request: web.Request, prompt_tokens: int, output_tokens: int) -> None:
    """Add tokens of an answer, or of a part of it, to what the request's log line will say."""
    before = request.get(_TOKENS, (0, 0))
    request[_TOKENS] = (before[0] + prompt_tokens, before[1] + output_tokens)


class Observer:
    """The outermost middleware, and what the routes report to it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def answered(self, completion: Completion) -> None:
        self._metrics.answered(completion)

    def failed(self, request: web.Request, error: Exception) -> None:
        """A request failed after its status was sent."""
        request[_ERROR] = self._explain(request, error).body["error"]["code"] or "error"

    async def sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """Put the request's id on a response that is about to begin, and who serves it."""
        response.headers["Server"] = SERVER
        if (name := request.get(_REQUEST_ID)) is not None:
            response.headers["X-Request-Id"] = name

    @property
    def middleware(self) -> Middleware:
        @web.middleware
        async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
            loop = asyncio.get_running_loop()
            began = loop.time()
            request[_REQUEST_ID] = _request_id(request.headers.get("X-Request-Id", ""))
            status = CLIENT_LEFT
            try:
                response = await self._answer(request, handler)
                status = response.status
                return response
            finally:
                self._tell(request, status, loop.time() - began)

        return observe

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            found = _http_error(request, error)
        except Exception as error:  # noqa: BLE001  whatever it was, the client gets an answer
            found = self._explain(request, error)
        response = web.Response(
            body=msgspec.json.encode(found.body),
            status=found.status,
            headers=found.headers,
            content_type="application/json",
        )
        if not request.content.is_eof():
            response.force_close()  # the rest of the body has no reader: the next request would stand behind it
        request[_ERROR] = found.body["error"]["code"] or found.body["error"]["type"]
        return response

    def _explain(self, request: web.Request, error: Exception) -> HttpError:
        found = as_http(error)
        if found is None:
            log.error("request %s failed: %s", request.get(_REQUEST_ID), type(error).__name__, exc_info=error)
            return INTERNAL
        return found

    def _tell(self, request: web.Request, status: int, seconds: float) -> None:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        self._metrics.responded(request.method if request.method in _METHODS else "other", route, status)
        prompt_tokens, output_tokens = request.get(_TOKENS, (0, 0))
        told = {
            "request_id": request[_REQUEST_ID],
            "client": request.remote or "",
            "method": request.method,
            "path": request.rel_url.raw_path,  # as it was sent: decoded, it could hold the end of a line
            "status": status,
            "seconds": round(seconds, 4),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "error": request.get(_ERROR, ""),
        }
        access_log.log(
            logging.DEBUG if request.path in _PROBED else logging.INFO,
            '%s "%s %s" %d %.3fs in=%d out=%d%s %s',
            told["client"], told["method"], told["path"], status, seconds, prompt_tokens, output_tokens,
            f" error={told['error']}" if told["error"] else "", told["request_id"],
            extra={"fields": told},
        )  # fmt: skip


_PROBED = frozenset({"/health", "/metrics"})  # every few seconds: they would drown the rest
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


def _request_id(given: str) -> str:
    """The client's own id where it is one that a log can hold, else a new one."""
    return given if _GOOD_ID.fullmatch(given) else f"req_{uuid4().hex}"


def _http_error(request: web.Request, error: web.HTTPException) -> HttpError:
    if error.status == 404:
        return HttpError(
            404, f"{request.rel_url.raw_path} is not served here; /openapi.json lists what is", code="not_found"
        )
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return HttpError(
            405, f"{request.rel_url.raw_path} does not take {request.method}; use {allowed}",
            code="method_not_allowed", headers={"Allow": allowed},
        )  # fmt: skip
    return HttpError(error.status, error.reason)
