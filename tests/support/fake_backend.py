"""Whoever answers in a chat, decided by a test: tokens are words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from corellm.chat.backend import AnswerEnd, Messages, Piece, RawPrompt
from corellm.chat.conversation import Call
from corellm.errors import CoreLLMError, PromptTooLongError


def count_words(messages: Messages) -> int:
    return sum(len(str(message["content"]).split()) for message in messages)


class FakeBackend:
    """Answers with the pieces of `answer(messages)`; `failure` is raised, and `block` waits for ever, after them."""

    model = "fake-model"

    def __init__(
        self,
        answer: Callable[[Messages], Sequence[str]] = lambda messages: ["fine"],
        *,
        context: int | None = 100,
        failure: CoreLLMError | None = None,
        block: bool = False,
        calls: Sequence[Call] = (),
    ) -> None:
        self.context = context
        self.failure, self.block, self.calls = failure, block, list(calls)
        self.asked: list[list[Mapping[str, Any]]] = []
        self.sampling: list[dict[str, Any]] = []
        self._answer = answer

    async def stream(
        self, messages: Messages, sampling: Mapping[str, Any], tools: Messages
    ) -> AsyncGenerator[Piece, None]:
        self.asked.append(list(messages))
        self.sampling.append(dict(sampling))
        prompt = count_words(messages)
        if self.context is not None and prompt + sampling.get("max_tokens", 1) > self.context:
            raise PromptTooLongError(f"the prompt has {prompt} tokens", "prompt")
        pieces = self._answer(messages)
        for piece in pieces:
            await asyncio.sleep(0)
            yield Piece(piece)
        if self.failure is not None:
            raise self.failure
        if self.block:
            await asyncio.get_running_loop().create_future()
        yield Piece("", self._end(prompt, len(pieces)))

    def count(self, messages: Messages, tools: Messages) -> int | None:
        return None if self.context is None else count_words(messages)

    def raw(self, messages: Messages, sampling: Mapping[str, Any], tools: Messages) -> RawPrompt:
        return RawPrompt(json.dumps(list(messages)), list(range(count_words(messages))))

    async def died(self) -> CoreLLMError:
        never: asyncio.Future[CoreLLMError] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        return

    def _end(self, prompt: int, output: int) -> AnswerEnd:
        return AnswerEnd(
            finish_reason="tool_calls" if self.calls else "stop",
            prompt_tokens=prompt,
            cached_tokens=0,
            output_tokens=output,
            first_token_s=0.1,
            total_s=0.2,
            tool_calls=list(self.calls),
        )
