"""The chunks of a streamed answer of OpenAI's chat API, put together."""

from __future__ import annotations

import json
from typing import Any

from corellm.chat.backend import AnswerEnd
from corellm.chat.conversation import Call
from corellm.errors import UpstreamError


class AnswerChunks:
    """Push each chunk's JSON, get its text; `end` has what came beside the text."""

    def __init__(self) -> None:
        self._finish = "stop"
        self._usage: dict[str, Any] = {}
        self._calls: dict[int, Call] = {}

    def push(self, data: str) -> str:
        """Raises `UpstreamError` for an error event, and for what is no chunk."""
        try:
            chunk = json.loads(data)
            if error := chunk.get("error"):
                message = error.get("message") if isinstance(error, dict) else error
                raise UpstreamError(f"the server ended the answer: {message}")
            self._usage = dict(chunk.get("usage") or self._usage)
            text = ""
            for choice in chunk.get("choices", ())[:1]:  # the last chunk has the usage and no choice
                delta = choice.get("delta") or {}
                text = delta.get("content") or ""
                self._finish = choice.get("finish_reason") or self._finish
                for call in delta.get("tool_calls") or ():
                    self._add_call(call)
            return str(text)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise UpstreamError("the server sent an event that is no chunk of a chat's answer") from None

    def end(self, first_token_s: float, total_s: float) -> AnswerEnd:
        """How the answer ended; times are seconds from the request."""
        details = self._usage.get("prompt_tokens_details")
        return AnswerEnd(
            finish_reason=self._finish,
            prompt_tokens=_count(self._usage.get("prompt_tokens")),
            cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
            output_tokens=_count(self._usage.get("completion_tokens")),
            first_token_s=first_token_s or total_s,
            total_s=total_s,
            tool_calls=[self._calls[index] for index in sorted(self._calls)],
        )

    def _add_call(self, delta: dict[str, Any]) -> None:
        """Name and id come once, arguments in pieces."""
        call = self._calls.setdefault(int(delta["index"]), Call(id="", name="", arguments=""))
        function = delta.get("function") or {}
        call.id = str(delta.get("id") or call.id)
        call.name = str(function.get("name") or call.name)
        call.arguments += str(function.get("arguments") or "")


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None
