"""Every field of the request bodies of the OpenAI API that CoreLLM knows, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from corellm.errors import InvalidRequestError
from corellm.openai_api import kinds, tools
from corellm.openai_api.kinds import MAX_INT32, Kind, shown
from corellm.sampling_params import MAX_LOGPROBS

MAX_CHOICES = 128
MAX_PRIORITY = 100


class Endpoint(Enum):
    """What a body is sent to; the value is its path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class Use(Enum):
    """Who reads a field."""

    SAMPLING = "passed to SamplingParams under its own name"
    REQUEST = "read by corellm.openai_api.requests"
    NONE = "accepted or refused by its kind, without effect"


@dataclass(frozen=True, slots=True)
class Field:
    """One field: the kind that checks and converts its value, who reads it, and the one endpoint that has it."""

    name: str
    kind: Kind
    use: Use = Use.SAMPLING
    only: Endpoint | None = None


_CHAT, _COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS
_COUNT = kinds.integer(1, MAX_INT32)
_COUNT_OR_NONE = kinds.integer(0, MAX_INT32)  # none: the prompt alone

FIELDS = (
    Field("model", kinds.text, Use.REQUEST),
    Field("messages", kinds.conversation, Use.REQUEST, _CHAT),
    Field("prompt", kinds.prompts, Use.REQUEST, _COMPLETIONS),
    Field("max_tokens", _COUNT, Use.REQUEST, _CHAT),
    Field("max_tokens", _COUNT_OR_NONE, Use.REQUEST, _COMPLETIONS),
    Field("max_completion_tokens", _COUNT, Use.REQUEST, _CHAT),
    Field("max_completion_tokens", _COUNT_OR_NONE, Use.REQUEST, _COMPLETIONS),
    Field("n", kinds.integer(1, MAX_CHOICES), Use.REQUEST),
    Field("best_of", kinds.integer(1, MAX_CHOICES), Use.REQUEST),
    Field("stream", kinds.boolean, Use.REQUEST),
    Field("stream_options", kinds.stream_options, Use.REQUEST),
    Field("logprobs", kinds.boolean, Use.REQUEST, _CHAT),
    Field("logprobs", kinds.integer(0, MAX_LOGPROBS), Use.REQUEST, _COMPLETIONS),
    Field("top_logprobs", kinds.integer(0, MAX_LOGPROBS), Use.REQUEST, _CHAT),
    Field("prompt_logprobs", kinds.integer(0, MAX_LOGPROBS), Use.REQUEST),
    Field("echo", kinds.boolean, Use.REQUEST, _COMPLETIONS),
    Field("response_format", kinds.response_format, Use.REQUEST),
    Field("tools", tools.tools, Use.REQUEST, _CHAT),
    Field("tool_choice", tools.tool_choice, Use.REQUEST, _CHAT),
    Field("parallel_tool_calls", kinds.boolean, Use.REQUEST, _CHAT),
    Field("add_generation_prompt", kinds.boolean, Use.REQUEST, _CHAT),
    Field("continue_final_message", kinds.boolean, Use.REQUEST, _CHAT),
    Field("priority", kinds.integer(0, MAX_PRIORITY), Use.REQUEST),
    Field("cache_salt", kinds.text, Use.REQUEST),
    Field("temperature", kinds.number),
    Field("top_p", kinds.number),
    Field("top_k", kinds.integer(-1, MAX_INT32)),
    Field("min_p", kinds.number),
    Field("presence_penalty", kinds.number),
    Field("frequency_penalty", kinds.number),
    Field("repetition_penalty", kinds.number),
    Field("min_tokens", kinds.integer(0, MAX_INT32)),
    Field("seed", kinds.integer(-(2**63), 2**63 - 1)),
    Field("stop", kinds.stop_strings),
    Field("stop_token_ids", kinds.token_ids),
    Field("include_stop_str_in_output", kinds.boolean),
    Field("ignore_eos", kinds.boolean),
    Field("logit_bias", kinds.logit_bias),
    # For OpenAI's own service alone: nothing to do. What strings may say there changes too often to be checked here.
    Field("user", kinds.text, Use.NONE),
    Field("metadata", kinds.an_object, Use.NONE),
    Field("store", kinds.boolean, Use.NONE),
    Field("service_tier", kinds.text, Use.NONE),
    Field("safety_identifier", kinds.text, Use.NONE),
    Field("prompt_cache_key", kinds.text, Use.NONE),
    Field("prompt_cache_options", kinds.an_object, Use.NONE),
    Field("prompt_cache_retention", kinds.text, Use.NONE),
    # They would change the answer: refused unless they ask for nothing.
    Field("functions", kinds.unsupported([]), Use.NONE, _CHAT),
    Field("function_call", kinds.unsupported("none"), Use.NONE, _CHAT),
    Field("modalities", kinds.unsupported(["text"]), Use.NONE, _CHAT),
    Field("audio", kinds.unsupported(), Use.NONE, _CHAT),
    Field("prediction", kinds.unsupported(), Use.NONE, _CHAT),
    Field("moderation", kinds.unsupported(), Use.NONE, _CHAT),
    Field("reasoning_effort", kinds.unsupported("none"), Use.NONE, _CHAT),
    Field("verbosity", kinds.unsupported(), Use.NONE, _CHAT),
    Field("web_search_options", kinds.unsupported(), Use.NONE, _CHAT),
    Field("suffix", kinds.unsupported(""), Use.NONE, _COMPLETIONS),
)

TABLES: dict[Endpoint, dict[str, Field]] = {
    endpoint: {field.name: field for field in FIELDS if field.only in (None, endpoint)} for endpoint in Endpoint
}


def read_fields(body: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The body's fields, checked and converted; null ones, which mean their default, are left out.

    Raises `InvalidRequestError` naming the first field that is unknown, of the wrong kind, or not supported.
    """
    table = TABLES[endpoint]
    values: dict[str, Any] = {}
    for name, value in body.items():
        field = table.get(name)
        if field is None:
            raise InvalidRequestError(_unknown(name, endpoint), name)
        if value is not None:
            values[name] = field.kind(name, value)
    return values


def _unknown(name: str, endpoint: Endpoint) -> str:
    from difflib import get_close_matches  # on the error path alone

    near = get_close_matches(name[:64], TABLES[endpoint], n=1)
    hint = f"did you mean {near[0]}?" if near else "remove it"
    return f"{shown(name)} is not a field of {endpoint.value}; {hint}"
