"""Answers from any server that speaks OpenAI's chat API. The key goes into one header and nowhere else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from corellm.chat.answer_chunks import AnswerChunks
from corellm.chat.backend import Messages, Piece, RawPrompt
from corellm.chat.sse import EventParser
from corellm.errors import CoreLLMError, PromptTooLongError, UpstreamError

CONNECT_S = 10.0
LIST_S = 30.0  # for the list of models
SILENCE_S = 300.0  # a large model on a busy server may take minutes to its first token
_MAX_BODY = 2**24  # bytes of a list or an error that are read
_DONE = "[DONE]"


class HttpBackend:
    """A chat at `url`, which ends before `/chat/completions`. Make it with `connect`, end it with `close`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, context: int | None) -> None:
        self._session, self._url = session, url
        self._model, self._context = model, context

    @classmethod
    async def connect(cls, url: str, api_key: str | None, model: str | None) -> HttpBackend:
        """Ask the server for its models, and take `model` or else the first.

        Raises `UpstreamError` when it cannot be reached, refuses, or has no such model.
        """
        headers = {"User-Agent": "corellm"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        try:
            entry = _choose(await _models(session, url), url, model)
        except BaseException:
            await session.close()
            raise
        context = entry.get("max_model_len")
        return cls(session, url, str(entry["id"]), context if isinstance(context, int) else None)

    @property
    def model(self) -> str:
        return self._model

    @property
    def context(self) -> int | None:
        return self._context

    async def stream(
        self, messages: Messages, sampling: Mapping[str, Any], tools: Messages
    ) -> AsyncGenerator[Piece, None]:
        started = time.monotonic()
        parser, chunks = EventParser(), AnswerChunks()
        first_s = 0.0
        body = self._body(messages, sampling, tools)
        try:
            async with self._session.post(f"{self._url}/chat/completions", json=body, allow_redirects=False) as answer:
                await _check(answer, self._url)
                async for received in answer.content.iter_any():
                    for data in parser.push(received):
                        if data == _DONE:
                            yield Piece("", chunks.end(first_s, time.monotonic() - started))
                            return
                        if text := chunks.push(data):
                            first_s = first_s or time.monotonic() - started
                            yield Piece(text)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(self._url, error) from None
        raise UpstreamError(f"{self._url} broke the answer off before its end; /retry asks again")

    def count(self, messages: Messages, tools: Messages) -> int | None:
        return None

    def raw(self, messages: Messages, sampling: Mapping[str, Any], tools: Messages) -> RawPrompt:
        """The body of the request: what the server makes of it is the server's."""
        body = json.dumps(self._body(messages, sampling, tools), ensure_ascii=False, indent=2)
        return RawPrompt(f"POST {self._url}/chat/completions\n{body}", None)

    async def died(self) -> CoreLLMError:
        never: asyncio.Future[CoreLLMError] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        await self._session.close()

    def _body(self, messages: Messages, sampling: Mapping[str, Any], tools: Messages) -> dict[str, Any]:
        """Only what was set is sent: servers refuse fields that they do not know."""
        body = {"model": self._model, "messages": list(messages), **sampling}
        if tools:
            body["tools"] = list(tools)
        return body | {"stream": True, "stream_options": {"include_usage": True}}


async def _models(session: aiohttp.ClientSession, url: str) -> list[Mapping[str, Any]]:
    try:
        async with asyncio.timeout(LIST_S), session.get(f"{url}/models", allow_redirects=False) as answer:
            if answer.status == 404:
                return []  # some servers have no list, and answer to the right name
            await _check(answer, url)
            found = json.loads(await _read(answer))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _unreachable(url, error) from None
    except (ValueError, RecursionError):
        found = None
    entries = found.get("data") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise UpstreamError(f"{url}/models is no list of models; {_usual(url)}")
    return [entry for entry in entries if isinstance(entry, dict) and "id" in entry]


def _choose(models: list[Mapping[str, Any]], url: str, wanted: str | None) -> Mapping[str, Any]:
    if not models and wanted:
        return {"id": wanted}
    for entry in models:
        if wanted in (None, entry["id"]):
            return entry
    names = ", ".join(str(entry["id"]) for entry in models[:20]) or "none"
    if wanted:
        raise UpstreamError(f"{url} has no model {wanted!r}; --model may be one of: {names}")
    if _lacks_path(url):
        raise UpstreamError(f"{url} has no list of models; {_usual(url)}")
    raise UpstreamError(f"{url} does not say which models it has; give --model, and check that --url is right")


def _lacks_path(url: str) -> bool:
    return urlsplit(url).path in ("", "/")


def _usual(url: str) -> str:
    """What to try where no API answers."""
    if _lacks_path(url):
        return f"OpenAI servers usually answer under /v1: try --url {url.rstrip('/')}/v1"
    return "--url is usually http://HOST:PORT/v1"


async def _check(answer: aiohttp.ClientResponse, url: str) -> None:
    """Raise what an HTTP error means."""
    if answer.status == 200:
        return
    body = await _read(answer)
    try:
        found = json.loads(body)["error"]
        message, code, field = str(found["message"]), found.get("code"), found.get("param")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        message, code, field = answer.reason or "no reason given", None, None
    if code == PromptTooLongError.code:
        raise PromptTooLongError(message, field if isinstance(field, str) else "messages")
    wrong_url = f"; {_usual(url)}" if _lacks_path(url) else "; is --url right?"
    hint = {401: "; give the right --api-key", 403: "; give the right --api-key", 404: wrong_url}
    raise UpstreamError(f"{url} answers {answer.status}: {message}{hint.get(answer.status, '')}")


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """A body, up to a bound: `StreamReader.read` gives what has arrived, which may be half of it."""
    body = bytearray()
    async for received in answer.content.iter_any():
        body += received
        if len(body) > _MAX_BODY:
            break
    return bytes(body)


def _unreachable(url: str, error: Exception) -> UpstreamError:
    reason = "it did not answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    return UpstreamError(f"{url}: {reason}; check --url and that the server runs")
