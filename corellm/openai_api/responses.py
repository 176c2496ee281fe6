"""Answers and errors in OpenAI's shapes, as plain dictionaries ready for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from corellm.errors import (
    CoreLLMError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    PromptTooLongError,
)
from corellm.openai_api.logprobs import chat_logprobs, completion_logprobs
from corellm.openai_api.results import Completion, TokenBytes


@dataclass(frozen=True, slots=True)
class Head:
    """What opens every response body."""

    id: str
    created: int  # Unix seconds
    model: str


# The first class that an error is an instance of decides. What is not listed is no fault of the request: 500.
_STATUSES: tuple[tuple[type[CoreLLMError], int, str], ...] = (
    (InvalidRequestError, 400, "invalid_request_error"),
    (ModelNotFoundError, 404, "invalid_request_error"),
    (EngineDeadError, 503, "service_unavailable_error"),
    (CoreLLMError, 500, "server_error"),
)


def error_status(error: CoreLLMError) -> int:
    """The HTTP status of an error."""
    return next(status for kind, status, _ in _STATUSES if isinstance(error, kind))


def error_body(error: CoreLLMError, *, prefix: str = "") -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`; `prefix` goes before the message."""
    return {
        "error": {
            "message": prefix + error.message,
            "type": next(name for kind, _, name in _STATUSES if isinstance(error, kind)),
            "param": error.param if isinstance(error, InvalidRequestError) else None,
            "code": _error_code(error),
        }
    }


def _error_code(error: CoreLLMError) -> str | None:
    """OpenAI sends no code with a plain bad field: `param` says which."""
    if isinstance(error, InvalidRequestError) and not isinstance(error, PromptTooLongError):
        return None
    return error.code


def usage(groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """The token counts of a request; `groups[prompt][choice]`.

    A prompt counts once however many choices it has, and as cached only what none of them had to compute.
    """
    prompt_tokens = sum(choices[0].prompt_tokens for choices in groups)
    completion_tokens = sum(choice.output_tokens for choices in groups for choice in choices)
    cached_tokens = sum(min(choice.cached_tokens for choice in choices) for choices in groups)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def chat_body(head: Head, choices: Sequence[Completion], token_bytes: TokenBytes) -> dict[str, Any]:
    """A `chat.completion` object."""
    return {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs, token_bytes),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage([choices]),
    }


def completion_body(head: Head, groups: Sequence[Sequence[Completion]], token_bytes: TokenBytes) -> dict[str, Any]:
    """A `text_completion` object; `groups[prompt][choice]`, indexed prompt-major as OpenAI does."""
    choices = [choice for group in groups for choice in group]
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [
            {
                "index": index,
                "text": choice.text,
                "logprobs": None
                if choice.logprobs is None
                else completion_logprobs(choice.logprobs, choice.text, token_bytes),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage(groups),
    }
