"""Bodies of /v1/chat/completions and /v1/completions as typed requests: shared by the batch and the HTTP server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from corellm.errors import InvalidRequestError
from corellm.openai_api.fields import TABLES, Endpoint, Use, read_fields
from corellm.openai_api.tools import ToolUse, tool_use
from corellm.sampling_params import SamplingParams

COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat fills the context
MAX_SEED = 2**63 - 1
MAX_ANSWERS = 2048  # of one request: its prompts times n

NO_DEFAULTS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What both kinds of request say about how to answer."""

    params: SamplingParams
    model: str | None = None
    n: int = 1  # choices for each prompt
    prompt_only: bool = False  # nothing generated is wanted; `params` asks for one token, the fewest there can be
    stream: bool = False
    include_usage: bool = False  # of stream_options: a last chunk with the token counts
    continuous_usage: bool = False  # of stream_options: the counts so far in every chunk
    priority: int | None = None
    cache_salt: str = ""
    prompt_logprobs: int | None = None  # shown as a field of their own; `params` may ask for more, to echo them

    def choice_params(self, choice: int) -> SamplingParams:
        """The parameters of one of the n choices: a given seed counts up, or else all n would be the same text."""
        if self.params.seed is None or choice == 0:
            return self.params
        seed = self.params.seed + choice
        return replace(self.params, seed=seed if seed <= MAX_SEED else seed - 2**64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to continue. The messages are OpenAI's objects, unchecked: the prompt format knows its roles."""

    messages: list[dict[str, Any]]
    tools: ToolUse | None = None  # None: none that may be called
    generation: Generation
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Prompts to continue, each a text or token ids."""

    prompts: tuple[str | tuple[int, ...], ...]
    generation: Generation
    echo: bool = False  # the answer begins with the prompt


def parse_request(
    endpoint: Endpoint, body: Mapping[str, Any], defaults: Mapping[str, Any] = NO_DEFAULTS
) -> ChatRequest | CompletionRequest:
    """Check a body; `defaults` are fields that hold where the body does not say.

    Raises `InvalidRequestError`, naming the field.
    """
    values = read_fields(_merged(body, defaults), endpoint)
    if endpoint is Endpoint.CHAT:
        return _chat(values)
    return _completion(values)


def _merged(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    if not defaults:
        return body
    merged = dict(defaults)
    if body.get("max_completion_tokens") is not None or body.get("max_tokens") is not None:
        merged.pop("max_tokens", None)
        merged.pop("max_completion_tokens", None)
    merged.update((name, value) for name, value in body.items() if value is not None or name not in merged)
    return merged


def _chat(values: dict[str, Any]) -> ChatRequest:
    if "messages" not in values:
        raise InvalidRequestError("messages is missing; give a non-empty list of messages", "messages")
    wanted = values.get("logprobs", False)
    top = values.get("top_logprobs")
    if top and not wanted:
        raise InvalidRequestError(f"top_logprobs is {top}, but logprobs is not true; set logprobs too", "top_logprobs")
    open_ended = values.get("continue_final_message", False)
    add_prompt = values.get("add_generation_prompt", not open_ended)
    if open_ended and add_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt are both true; set one of them to false",
            "continue_final_message",
        )
    tools = tool_use(values)
    limits = SamplingParams(
        logprobs=(top or 0) if wanted else None,
        prompt_logprobs=values.get("prompt_logprobs"),
        constraint=tools.constraint(values.get("response_format")) if tools else values.get("response_format"),
        skip_special_tokens=tools is None,  # one of them marks calls
    )
    return ChatRequest(
        messages=values["messages"],
        tools=tools,
        generation=_generation(values, Endpoint.CHAT, limits),
        add_generation_prompt=add_prompt,
        continue_final_message=open_ended,
    )


def _completion(values: dict[str, Any]) -> CompletionRequest:
    if "prompt" not in values:
        raise InvalidRequestError("prompt is missing; give a string, token ids, or a list of either", "prompt")
    prompts = values["prompt"]
    echo, logprobs = values.get("echo", False), values.get("logprobs")
    limits = SamplingParams(
        logprobs=logprobs,
        prompt_logprobs=_most(values.get("prompt_logprobs"), logprobs if echo else None),
        constraint=values.get("response_format"),
    )
    generation = _generation(values, Endpoint.COMPLETIONS, limits)
    if generation.prompt_only:
        _check_prompt_only(values)
    if len(prompts) * generation.n > MAX_ANSWERS:
        raise InvalidRequestError(
            f"prompt holds {len(prompts)} prompts and n is {generation.n}, {len(prompts) * generation.n} answers "
            f"together; a request may have {MAX_ANSWERS}: split it",
            "prompt",
        )
    return CompletionRequest(prompts=prompts, generation=generation, echo=echo)


def _generation(values: dict[str, Any], endpoint: Endpoint, params: SamplingParams) -> Generation:
    """`params` holds what the endpoints have differently."""
    table = TABLES[endpoint]
    sampling = {name: value for name, value in values.items() if table[name].use is Use.SAMPLING}
    n = values.get("n", 1)
    if values.get("best_of", n) != n:
        raise InvalidRequestError(
            f"best_of is {values['best_of']} and n is {n}; only best_of = n is supported", "best_of"
        )
    stream = values.get("stream", False)
    if values.get("stream_options") and not stream:
        raise InvalidRequestError("stream_options is given, but stream is not true; set stream too", "stream_options")
    if stream and "prompt_logprobs" in values:
        raise InvalidRequestError(
            "prompt_logprobs is given and stream is true; only a whole answer has a place for them", "prompt_logprobs"
        )
    options = values.get("stream_options", {})
    max_tokens = _max_tokens(values, endpoint)
    return Generation(
        params=replace(params, max_tokens=1 if max_tokens == 0 else max_tokens, **sampling),
        model=values.get("model"),
        n=n,
        prompt_only=max_tokens == 0,
        stream=stream,
        include_usage=options.get("include_usage") or False,
        continuous_usage=options.get("continuous_usage_stats") or False,
        priority=values.get("priority"),
        cache_salt=values.get("cache_salt", ""),
        prompt_logprobs=values.get("prompt_logprobs"),
    )


def _check_prompt_only(values: dict[str, Any]) -> None:
    """Raise `InvalidRequestError` for what contradicts a `max_tokens` of 0."""
    name = "max_tokens" if "max_tokens" in values else "max_completion_tokens"
    if not values.get("echo"):
        raise InvalidRequestError(
            f"{name} is 0, but echo is not true; set echo to get the prompt alone, or {name} to at least 1", name
        )
    for other, most in (("n", 1), ("min_tokens", 0)):
        if values.get(other, most) > most:
            raise InvalidRequestError(
                f"{other} is {values[other]} and {name} is 0, the prompt alone; leave {other} out", other
            )


def _most(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _max_tokens(values: dict[str, Any], endpoint: Endpoint) -> int | None:
    old: int | None = values.get("max_tokens")
    new: int | None = values.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            f"max_tokens is {old} and max_completion_tokens is {new}; give one of them", "max_completion_tokens"
        )
    given = new if old is None else old
    if given is None and endpoint is Endpoint.COMPLETIONS:
        return COMPLETIONS_MAX_TOKENS
    return given
