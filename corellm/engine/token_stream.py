"""The tokens of one request, on their way from the engine to whoever reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from corellm.comms.messages import Finish, Logprobs, PromptLogprobs
from corellm.errors import CoreLLMError, ProtocolError, RequestAbortedError, from_code

if TYPE_CHECKING:
    from corellm.engine.engine_client import EngineClient


@dataclass(slots=True)
class TokenBatch:
    """Tokens that came together, in order, with their log-probabilities if asked for. `finish` ends the request.

    Log-probabilities of the prompt all come with or before the first token.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finish: Finish | None = None


class TokenStream:
    """The tokens of one request. Iterate to the end, or `abort`; leaving the `async for` early needs an abort."""

    def __init__(self, client: EngineClient, tag: int) -> None:
        self.tag = tag
        self._client = client
        self._batch = TokenBatch()
        self._received = 0
        self._error: CoreLLMError | None = None
        self._wake: asyncio.Future[None] | None = None

    def push(self, token: int, index: int) -> None:
        if index != self._received:
            self.fail(ProtocolError(f"token {self._received} of request {self.tag} is lost; token {index} came"))
            return
        self._received += 1
        self._batch.tokens.append(token)
        self._notify()

    def push_logprobs(self, logprobs: Logprobs) -> None:
        self._batch.logprobs.append(logprobs)

    def push_prompt_logprobs(self, found: PromptLogprobs) -> None:
        self._batch.prompt_logprobs.append(found)

    def finish(self, finish: Finish) -> None:
        if finish.reason == "error":
            self.fail(from_code(finish.code, finish.message, finish.param or None))
        elif finish.reason == "abort":
            self.fail(RequestAbortedError("the request was aborted"))
        else:
            self._batch.finish = finish
            self._notify()

    def fail(self, error: CoreLLMError) -> None:
        self._error = error
        self._notify()

    def abort(self) -> None:
        """Give the request up. Idempotent; nothing is delivered afterwards."""
        self._client.abort(self)

    async def end(self) -> Finish:
        """Stop here on our own account, and return the request's terminal event; tokens on their way are dropped."""
        self._client.ask_to_end(self, satisfied=True)
        async for batch in self._batches():
            if batch.finish is not None:
                return batch.finish
        raise RuntimeError("a stream ended without its end")

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self._batches()

    async def _batches(self) -> AsyncIterator[TokenBatch]:
        """Whatever has come since the last time, as one batch: a slow reader gets fewer and larger ones."""
        while True:
            while not self._batch.tokens and self._batch.finish is None and self._error is None:
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake
            batch, self._batch = self._batch, TokenBatch()
            if batch.tokens or batch.finish is not None:
                yield batch
            if batch.finish is not None:
                return
            if self._error is not None:
                raise self._error

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
