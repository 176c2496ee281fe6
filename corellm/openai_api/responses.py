"""Answers and errors in OpenAI's shapes, as plain dictionaries ready for JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from corellm.errors import (
    CoreLLMError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PromptTooLongError,
)
from corellm.openai_api.fields import Endpoint
from corellm.openai_api.logprobs import (
    after_echo,
    chat_logprobs,
    completion_logprobs,
    echo_logprobs,
    echo_text,
    prompt_logprobs,
)
from corellm.openai_api.requests import ChatRequest, CompletionRequest
from corellm.openai_api.results import Completion, PromptOnly, TokenBytes
from corellm.openai_api.tools import ToolUse, finish_reason, split_calls


@dataclass(frozen=True, slots=True)
class Head:
    """What opens every response body."""

    id: str
    created: int  # Unix seconds
    model: str

    @classmethod
    def new(cls, endpoint: Endpoint, model: str) -> Head:
        """The head of a new response, with an id of its own."""
        kind = "chatcmpl" if endpoint is Endpoint.CHAT else "cmpl"
        return cls(f"{kind}-{uuid4().hex}", int(time.time()), model)


# The first class that an error is an instance of decides. What is not listed is no fault of the request: 500.
_STATUSES: tuple[tuple[type[CoreLLMError], int, str], ...] = (
    (InvalidRequestError, 400, "invalid_request_error"),
    (ModelNotFoundError, 404, "invalid_request_error"),
    (OverloadedError, 429, "rate_limit_error"),
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


def response_body(
    request: ChatRequest | CompletionRequest,
    head: Head,
    groups: Sequence[Sequence[Completion]],
    token_bytes: TokenBytes,
) -> dict[str, Any]:
    """The whole answer to a request; `groups[prompt][choice]`."""
    if request.generation.prompt_only:
        groups = [[PromptOnly.of(choice) for choice in choices] for choices in groups]
    scores = request.generation.prompt_logprobs
    if isinstance(request, ChatRequest):
        return chat_body(head, groups[0], token_bytes, tools=request.tools, prompt_scores=scores)
    echo = [echo_text(prompt, token_bytes) for prompt in request.prompts] if request.echo else None
    top = request.generation.params.logprobs or 0
    return completion_body(head, groups, token_bytes, echo=echo, top=top, prompt_scores=scores)


def chat_body(
    head: Head,
    choices: Sequence[Completion],
    token_bytes: TokenBytes,
    *,
    tools: ToolUse | None = None,
    prompt_scores: int | None = None,
) -> dict[str, Any]:
    """A `chat.completion` object. `tools` are those that the answer may call.

    With `prompt_scores`, so many of the likeliest tokens are shown for each of the prompt's.
    """
    body = {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [
            {
                "index": index,
                **_message(choice, tools),
                "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs, token_bytes),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage([choices]),
    }
    if prompt_scores is not None:
        body["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs or (), prompt_scores, token_bytes)
    return body


def _message(choice: Completion, tools: ToolUse | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if tools is None:
        return {"message": message, "finish_reason": choice.finish_reason}
    message["content"], calls = split_calls(choice.text, tools)
    if calls:
        message["tool_calls"] = calls
    return {"message": message, "finish_reason": finish_reason(choice.finish_reason, calls=len(calls))}


def completion_body(
    head: Head,
    groups: Sequence[Sequence[Completion]],
    token_bytes: TokenBytes,
    *,
    echo: Sequence[str] | None = None,
    top: int = 0,
    prompt_scores: int | None = None,
) -> dict[str, Any]:
    """A `text_completion` object; `groups[prompt][choice]`, indexed prompt-major as OpenAI does.

    `echo` are the texts of the prompts, if the answers begin with them, `top` how many of the likeliest tokens are told
    of theirs; `prompt_scores` as for a chat.
    """
    choices: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        prompt = "" if echo is None else echo[number]
        for choice in group:
            logprobs = _completion_logprobs(choice, None if echo is None else prompt, top, token_bytes)
            entry = {
                "index": len(choices),
                "text": prompt + choice.text,
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
            }
            if prompt_scores is not None:
                entry["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs or (), prompt_scores, token_bytes)
            choices.append(entry)
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": usage(groups),
    }


def _completion_logprobs(
    choice: Completion, echo: str | None, top: int, token_bytes: TokenBytes
) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    answer = completion_logprobs(choice.logprobs, choice.text, token_bytes)
    if echo is None or choice.prompt_logprobs is None:
        return answer
    return after_echo(echo_logprobs(choice.prompt_logprobs, echo, top, token_bytes), answer, len(echo))
