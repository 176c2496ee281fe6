"""Answers from an engine of ours, started for this chat or joined."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from uuid import uuid4

from corellm.chat.backend import AnswerEnd, Messages, Piece, RawPrompt
from corellm.chat.conversation import Call
from corellm.chat.settings import sampling_params
from corellm.errors import CoreLLMError, InvalidRequestError
from corellm.openai_api.tools import ToolUse, finish_reason
from corellm.text.tool_calls import CallDelta
from corellm.text_engine import Completion, TextEngine


class EngineBackend:
    """`date` is what prompts give as today's, None leaves it out."""

    def __init__(self, engine: TextEngine, date: str | None) -> None:
        self._engine, self._date = engine, date

    @property
    def model(self) -> str:
        return self._engine.info.model

    @property
    def context(self) -> int | None:
        return self._engine.info.max_request_tokens

    async def stream(
        self, messages: Messages, sampling: Mapping[str, Any], tools: Messages
    ) -> AsyncGenerator[Piece, None]:
        params = replace(sampling_params(sampling), skip_special_tokens=not tools)  # one of them marks calls
        calls = _Calls(tools)
        deltas = self._engine.stream(self._encode(messages, tools), params)
        async with aclosing(deltas):
            async for delta in deltas:
                text = calls.push(delta.text)
                if delta.end is None:
                    yield Piece(text)
                else:
                    yield Piece(text + calls.finish(), _end(delta.end, calls.found))

    def count(self, messages: Messages, tools: Messages) -> int | None:
        return len(self._encode(messages, tools)) if messages else 0

    def raw(self, messages: Messages, sampling: Mapping[str, Any], tools: Messages) -> RawPrompt:
        if self._engine.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer, so there is no prompt to show", "messages")
        ids = self._encode(messages, tools)
        return RawPrompt(self._engine.tokenizer.decode(ids, skip_special_tokens=False), ids)

    async def died(self) -> CoreLLMError:
        return await self._engine.died()

    async def close(self) -> None:
        await self._engine.close()

    def _encode(self, messages: Messages, tools: Messages) -> list[int]:
        return self._engine.encode_chat(messages, tools=tools or None, date=self._date)


class _Calls:
    """Separates an answer's text from the calls in it, `found` in order."""

    def __init__(self, tools: Messages) -> None:
        self.found: list[Call] = []
        self._parser = ToolUse(tools, parallel=True).parser() if tools else None

    def push(self, text: str) -> str:
        return text if self._parser is None else self._take(self._parser.push(text))

    def finish(self) -> str:
        return "" if self._parser is None else self._take(self._parser.finish())

    def _take(self, pieces: Iterable[str | CallDelta]) -> str:
        text = ""
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
            elif piece.name is not None:
                self.found.append(Call(id=f"call_{uuid4().hex}", name=piece.name, arguments=piece.arguments))
            else:
                self.found[piece.index].arguments += piece.arguments
        return text


def _end(completion: Completion, calls: list[Call]) -> AnswerEnd:
    return AnswerEnd(
        finish_reason=finish_reason(completion.finish_reason, calls=len(calls)),
        prompt_tokens=completion.prompt_tokens,
        cached_tokens=completion.cached_tokens,
        output_tokens=completion.output_tokens,
        first_token_s=completion.first_token_s,
        total_s=completion.total_s,
        tool_calls=calls,
    )
