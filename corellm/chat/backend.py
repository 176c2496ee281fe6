"""What a chat needs of whoever answers: an engine of ours, or a server somewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from corellm.chat.conversation import Call
from corellm.errors import CoreLLMError

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    """How an answer ended, and its figures; None: the server does not say. Times are seconds from the request."""

    finish_reason: str
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    first_token_s: float
    total_s: float
    tool_calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Piece:
    """What came since the last one. `end` is set on the last."""

    text: str
    end: AnswerEnd | None = None


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """What a model is given, exactly: its text with special tokens spelled out, and its ids if they are known."""

    text: str
    ids: Sequence[int] | None


class Backend(Protocol):
    """Answers conversations.

    `model` is the model's name, `context` the most tokens that a prompt and its answer may have together; None: not
    known.
    """

    @property
    def model(self) -> str: ...
    @property
    def context(self) -> int | None: ...

    def stream(self, messages: Messages, sampling: Mapping[str, Any], tools: Messages) -> AsyncGenerator[Piece, None]:
        """The answer in pieces. Closing the generator ends it.

        Raises `PromptTooLongError` when the conversation does not fit, other typed errors as they come.
        """
        ...

    def count(self, messages: Messages, tools: Messages) -> int | None:
        """How many tokens the prompt has; None: only the server knows."""
        ...

    def raw(self, messages: Messages, sampling: Mapping[str, Any], tools: Messages) -> RawPrompt:
        """What `stream` would send."""
        ...

    async def died(self) -> CoreLLMError:
        """Wait for the end of whoever answers, and return what ended it. Servers elsewhere never say."""
        ...

    async def close(self) -> None: ...
