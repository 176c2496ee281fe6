"""What the server can do now, and for how many: starting, ready, draining or dead, and the answers it works on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from corellm.comms.messages import Progress
from corellm.errors import CoreLLMError, InvalidRequestError
from corellm.openai_server.engine_api import Engine
from corellm.openai_server.errors import over_capacity, unavailable


class ServerState:
    """Shared by every route of one process. `capacity` is how many answers may be worked on at once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._engine: Engine | None = None
        self._progress = Progress(stage="start")
        self._failure: CoreLLMError | None = None
        self._draining = False
        self._open = 0  # answers worked on
        self._requests = 0  # requests that are not answered yet
        self._idle = asyncio.Event()
        self._idle.set()

    def report(self, progress: Progress) -> None:
        """How far the start-up is. May come from any thread."""
        self._progress = progress

    def serve(self, engine: Engine) -> None:
        self._engine = engine

    def drain(self) -> None:
        """Take no more requests."""
        self._draining = True

    def fail(self, error: CoreLLMError) -> None:
        """The engine is gone."""
        self._failure = error

    @property
    def open_answers(self) -> int:
        return self._open

    def health(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of `/health`."""
        if self._failure is not None:
            return 503, {"status": "dead", "reason": self._failure.message}
        if self._draining:
            return 503, {"status": "draining", "open_requests": self._requests}
        if self._engine is None:
            now = self._progress
            stage = {"stage": now.stage, "detail": now.detail, "done": now.done, "total": now.total, "unit": now.unit}
            return 503, {"status": "starting", **stage}
        return 200, {"status": "ok"}

    def engine(self) -> Engine:
        """The engine, when requests are welcome. Raises `HttpError` 503 when they are not."""
        if self._failure is not None:
            raise unavailable(f"the engine is gone: {self._failure.message}", self._failure.code)
        if self._draining:
            raise unavailable("the server is stopping and takes no new requests", "shutting_down")
        if self._engine is None:
            raise unavailable(
                f"the server is starting: {self._progress.stage}; /health says when it is ready", "starting"
            )
        return self._engine

    def check_room(self) -> None:
        """Raise `HttpError` 429 when no answer more can be worked on."""
        if self._open >= self._capacity:
            raise self._full()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """A request from its head to its end: draining waits for it."""
        self._requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._idle.set()

    @contextlib.contextmanager
    def answering(self, prompts: int, n: int) -> Iterator[None]:
        """Room for `n` answers to each prompt.

        Raises `HttpError` 429 when there is none now, `InvalidRequestError` when there never is.
        """
        answers = prompts * n
        if answers > self._capacity:
            raise self._never_fits(prompts, n)
        if self._open + answers > self._capacity:
            raise self._full()
        self._open += answers
        try:
            yield
        finally:
            self._open -= answers

    @property
    def is_idle(self) -> bool:
        return self._idle.is_set()

    async def idle(self) -> None:
        """Wait until every request is answered."""
        await self._idle.wait()

    def _never_fits(self, prompts: int, n: int) -> Exception:
        limit = f"this server works on {self._capacity} at once"
        if prompts == 1:
            return InvalidRequestError(f"n asks for {n} answers; {limit}: lower n", "n")
        return InvalidRequestError(
            f"prompt holds {prompts} prompts and n is {n}, {prompts * n} answers together; {limit}: split it", "prompt"
        )

    def _full(self) -> Exception:
        return over_capacity(f"{self._open} answers are being worked on, {self._capacity} are allowed; try again later")
