"""Bodies of /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corellm.errors import InvalidRequestError
from corellm.openai_api import kinds
from corellm.openai_api.kinds import Kind, shown

TOKENIZE: Mapping[str, Kind] = {
    "model": kinds.text,
    "prompt": kinds.text,
    "messages": kinds.conversation,
    "add_special_tokens": kinds.boolean,
    "add_generation_prompt": kinds.boolean,
    "continue_final_message": kinds.boolean,
    "return_token_strs": kinds.boolean,
}
DETOKENIZE: Mapping[str, Kind] = {"model": kinds.text, "tokens": kinds.token_ids}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A text or a conversation to turn into token ids; one of them is None."""

    model: str | None
    prompt: str | None
    messages: list[dict[str, Any]] | None
    add_special_tokens: bool  # of `prompt`: the BOS token, where the model expects one
    add_generation_prompt: bool
    continue_final_message: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """Token ids to turn into text."""

    model: str | None
    tokens: tuple[int, ...]


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Raises `InvalidRequestError`, naming the field."""
    values = _read(body, TOKENIZE, "/tokenize")
    if ("prompt" in values) == ("messages" in values):
        raise InvalidRequestError("give either prompt, a text, or messages, a conversation", "prompt")
    open_ended = values.get("continue_final_message", False)
    add_prompt = values.get("add_generation_prompt", not open_ended)
    if open_ended and add_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt are both true; set one of them to false",
            "continue_final_message",
        )
    return TokenizeRequest(
        model=values.get("model"),
        prompt=values.get("prompt"),
        messages=values.get("messages"),
        add_special_tokens=values.get("add_special_tokens", True),
        add_generation_prompt=add_prompt,
        continue_final_message=open_ended,
        return_token_strs=values.get("return_token_strs", False),
    )


def parse_detokenize(body: Mapping[str, Any]) -> DetokenizeRequest:
    """Raises `InvalidRequestError`, naming the field."""
    values = _read(body, DETOKENIZE, "/detokenize")
    if "tokens" not in values:
        raise InvalidRequestError("tokens is missing; give a list of token ids", "tokens")
    return DetokenizeRequest(model=values.get("model"), tokens=values["tokens"])


def _read(body: Mapping[str, Any], table: Mapping[str, Kind], path: str) -> dict[str, Any]:
    for name in body:
        if name not in table:
            raise InvalidRequestError(f"{shown(name)} is not a field of {path}; known are {', '.join(table)}", name)
    return {name: table[name](name, value) for name, value in body.items() if value is not None}
