"""The prompts of a request as token ids, checked against what the model can hold: shared by batch and server."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from corellm.comms.messages import EngineInfo
from corellm.errors import InvalidRequestError, PromptTooLongError
from corellm.openai_api.requests import ChatRequest, CompletionRequest


class Encoder(Protocol):
    """Prompts to token ids; raises `InvalidRequestError`. Called from other threads than the event loop's."""

    def encode_prompt(self, prompt: str | Sequence[int]) -> Sequence[int]: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request must fit: prompt + output tokens, and ids below the vocabulary's size."""

    max_request_tokens: int
    vocab: int

    @classmethod
    def of(cls, info: EngineInfo) -> ModelLimits:
        return cls(info.max_request_tokens, info.vocab)


def encode_request(request: ChatRequest | CompletionRequest, encoder: Encoder, limits: ModelLimits) -> list[array[int]]:
    """The prompts of a request, 4 bytes an id; a conversation is one prompt.

    Raises `InvalidRequestError`, naming the field, for what the model cannot encode, hold or know.
    """
    prompts = [array("i", ids) for ids in _encode(request, encoder)]
    field = "prompt" if isinstance(request, CompletionRequest) else "messages"
    params = request.generation.params
    for prompt in prompts:
        _check_length(len(prompt), params.max_tokens, field, limits.max_request_tokens)
        _check_ids(field, prompt, limits.vocab)
    _check_ids("logit_bias", params.logit_bias, limits.vocab)
    _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab)
    return prompts


def _encode(request: ChatRequest | CompletionRequest, encoder: Encoder) -> Iterator[Sequence[int]]:
    if isinstance(request, CompletionRequest):
        yield from map(encoder.encode_prompt, request.prompts)
        return
    yield encoder.encode_chat(
        request.messages,
        tools=request.tools.definitions if request.tools is not None else None,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )


def _check_length(prompt_tokens: int, max_tokens: int | None, field: str, limit: int) -> None:
    if not prompt_tokens:
        raise InvalidRequestError(f"{field} has no tokens; give at least one", field)
    if prompt_tokens + (max_tokens or 1) <= limit:
        return
    if max_tokens is None or prompt_tokens >= limit:
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens} tokens; with at least one of output, a request may have {limit}: "
            "shorten the prompt",
            field,
        )
    raise PromptTooLongError(
        f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, {prompt_tokens + max_tokens} "
        f"together; a request may have {limit}: lower max_tokens or shorten the prompt",
        "max_tokens",
    )


def _check_ids(field: str, ids: Iterable[int], vocab: int) -> None:
    highest = max(ids, default=0)
    if highest >= vocab:
        raise InvalidRequestError(f"{field} names token {highest}; the model's ids end at {vocab - 1}", field)
