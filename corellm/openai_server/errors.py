"""Refusals that are HTTP's own, in OpenAI's shape. Those of requests and of the engine are `CoreLLMError`s."""

from __future__ import annotations

from typing import Any

from corellm.errors import CoreLLMError, OverloadedError, RequestAbortedError
from corellm.openai_api.responses import error_body, error_status

RETRY_S = 1  # what `Retry-After` says; official clients wait so long and try again


class HttpError(Exception):
    """A response that is an error. `headers` go out with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body: dict[str, Any] = {"error": {"message": message, "type": type, "param": param, "code": code}}


def unauthorized(message: str) -> HttpError:
    return HttpError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def body_too_large(limit: int) -> HttpError:
    return HttpError(
        413, f"the body is longer than {limit} bytes; shorten it, or start the server with a larger --max-body"
    )


def over_capacity(message: str) -> HttpError:
    return HttpError(429, message, type="rate_limit_error", code=OverloadedError.code, headers=_RETRY)


def unavailable(message: str, code: str) -> HttpError:
    return HttpError(503, message, type="service_unavailable_error", code=code, headers=_RETRY)


_RETRY = {"Retry-After": str(RETRY_S)}


def as_http(error: Exception) -> HttpError | None:
    """The response that an error is answered by; None for one that nobody raised on purpose."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestAbortedError):  # nobody but a server that stops aborts what a client still waits for
        return unavailable("the server is stopping; the request was ended", "shutting_down")
    if isinstance(error, OverloadedError):
        return over_capacity(error.message)
    if isinstance(error, CoreLLMError):
        found = HttpError(error_status(error), error.message)
        found.body = error_body(error)
        return found
    return None


INTERNAL = HttpError(
    500, "the server failed on this request; its log says why", type="server_error", code="internal_error"
)
