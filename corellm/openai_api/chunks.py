"""Streamed answers in OpenAI's shapes: the chunks that each delta of a choice becomes.

Put together, the chunks of a choice say exactly what its unstreamed body says.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from corellm.openai_api.logprobs import chat_logprobs, completion_logprobs, echo_logprobs, echo_text
from corellm.openai_api.requests import ChatRequest, CompletionRequest
from corellm.openai_api.responses import Head, usage
from corellm.openai_api.results import Completion, Delta, PromptOnlyDelta, TokenBytes, TokenLogprob
from corellm.openai_api.tools import ToolUse, finish_reason, opened_call
from corellm.text.tool_calls import CallDelta


class StreamedAnswer:
    """The chunks of one response. `prompt_tokens` holds the length of each of the request's prompts."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        head: Head,
        token_bytes: TokenBytes,
        prompt_tokens: Sequence[int],
    ) -> None:
        generation = request.generation
        chat = isinstance(request, ChatRequest)
        self._n, self._prompt_only = generation.n, generation.prompt_only
        self._choices = _choices(request, token_bytes, len(prompt_tokens))
        self._ends: list[Completion | None] = [None] * len(self._choices)
        self._prompt_tokens, self._output_tokens = sum(prompt_tokens), 0
        self._include_usage, self._continuous_usage = generation.include_usage, generation.continuous_usage
        self._frame = {
            "id": head.id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": head.created,
            "model": head.model,
        }

    def push(self, index: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """The chunks, if any, that a delta of choice `index` (prompt-major) becomes."""
        if self._prompt_only:
            delta = PromptOnlyDelta.of(delta)
        self._output_tokens += len(delta.token_ids)
        if delta.end is not None:
            self._ends[index] = delta.end
        for choice in self._choices[index].push(delta):
            yield self._chunk([choice])

    def finish(self) -> Iterator[dict[str, Any]]:
        """What follows when every choice has ended: the token counts, if they were asked for."""
        if self._include_usage:
            ends = [end for end in self._ends if end is not None]
            groups = [ends[start : start + self._n] for start in range(0, len(ends), self._n)]
            yield {**self._frame, "choices": [], "usage": usage(groups)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._frame, "choices": choices}
        if self._continuous_usage:
            chunk["usage"] = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self._output_tokens,
                "total_tokens": self._prompt_tokens + self._output_tokens,
            }
        elif self._include_usage:
            chunk["usage"] = None
        return chunk


def _choices(request: ChatRequest | CompletionRequest, token_bytes: TokenBytes, prompts: int) -> Sequence[Choice]:
    """One for each answer, prompt-major."""
    n = request.generation.n
    if isinstance(request, ChatRequest):
        return [ChatChoice(index, token_bytes, request.tools) for index in range(n * prompts)]
    echoes = [echo_text(prompt, token_bytes) if request.echo else None for prompt in request.prompts]
    top = request.generation.params.logprobs or 0
    return [TextChoice(index, token_bytes, echoes[index // n], top) for index in range(n * prompts)]


class Choice(Protocol):
    """One entry of `choices`, in pieces."""

    def push(self, delta: Delta) -> Iterator[dict[str, Any]]: ...


class ChatChoice:
    """One streamed message: its role, then its content and the tools that it calls, then why it ended."""

    def __init__(self, index: int, token_bytes: TokenBytes, tools: ToolUse | None = None) -> None:
        self._index, self._token_bytes = index, token_bytes
        self._parser = None if tools is None else tools.parser()
        self._opened = False

    def push(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if not self._opened:
            self._opened = True
            yield self._piece({"role": "assistant", "content": "" if self._parser is None else None, "refusal": None})
        logprobs = delta.logprobs
        for message in self._messages(delta):
            yield self._piece(message, logprobs=logprobs)
            logprobs = ()
        if logprobs:
            yield self._piece({"content": ""}, logprobs=logprobs)
        if delta.end is not None:
            calls = self._parser.calls if self._parser is not None else 0
            yield self._piece({}, finish_reason=finish_reason(delta.end.finish_reason, calls=calls))

    def _messages(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if self._parser is None:
            if delta.text:
                yield {"content": delta.text}
            return
        pieces = self._parser.push(delta.text)
        if delta.end is not None:
            pieces += self._parser.finish()
        for piece in pieces:
            yield {"content": piece} if isinstance(piece, str) else {"tool_calls": [_call_piece(piece)]}

    def _piece(
        self,
        message: dict[str, Any],
        *,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": message,
            "logprobs": chat_logprobs(logprobs, self._token_bytes) if logprobs else None,
            "finish_reason": finish_reason,
        }


def _call_piece(piece: CallDelta) -> dict[str, Any]:
    if piece.name is not None:
        return {"index": piece.index, **opened_call(piece.name)}
    return {"index": piece.index, "function": {"arguments": piece.arguments}}


class TextChoice:
    """One streamed text, which begins with `echo`, its prompt's text, unless that is None.

    `top` is how many of the likeliest tokens are told of the prompt's.
    """

    def __init__(self, index: int, token_bytes: TokenBytes, echo: str | None = None, top: int = 0) -> None:
        self._index, self._token_bytes = index, token_bytes
        self._echo, self._top = echo, top
        self._length = len(echo or "")  # characters so far
        self._logprobs = _HeldLogprobs(token_bytes, self._length)

    def push(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if self._echo is not None:
            prompt = delta.prompt_logprobs
            shown = None if prompt is None else echo_logprobs(prompt, self._echo, self._top, self._token_bytes)
            yield self._piece(self._echo, shown)
            self._echo = None
        self._length += len(delta.text)
        logprobs = self._logprobs.push(delta.logprobs, self._length, ended=delta.end is not None)
        if delta.text or logprobs or delta.end is not None:
            yield self._piece(delta.text, logprobs, delta.end.finish_reason if delta.end is not None else None)

    def _piece(self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class _HeldLogprobs:
    """The logprobs of a streamed text, each held until its token's text is out.

    Only then is its `text_offset` known: text that may be the start of a stop string is held back, and may be cut off.
    """

    def __init__(self, token_bytes: TokenBytes, position: int) -> None:
        """`position` is where the text of the tokens begins, in characters."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = position
        self._held: deque[tuple[int, int, TokenLogprob]] = deque()  # (start, end, token), in characters

    def push(self, tokens: Sequence[TokenLogprob], length: int, *, ended: bool) -> dict[str, Any] | None:
        """Take in `tokens`; return those within the first `length` characters, or all when the text has ended."""
        for token in tokens:
            start = self._position
            self._position += len(self._decoder.decode(self._token_bytes(token.token_id)))
            self._held.append((start, self._position, token))
        ready = []
        while self._held and (ended or self._held[0][1] <= length):
            ready.append(self._held.popleft())
        if not ready:
            return None
        shape = completion_logprobs([token for _, _, token in ready], "", self._token_bytes)
        return {**shape, "text_offset": [min(start, length) for start, _, _ in ready]}
