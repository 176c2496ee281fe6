"""The sampling settings of a chat: named as in the API, given as text, checked by `SamplingParams`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from corellm.errors import ChatError, InvalidRequestError
from corellm.sampling_params import SamplingParams

# Meta's recommendation for the instruct models of Llama 3.1.
DEFAULTS: Mapping[str, Any] = {"temperature": 0.6, "top_p": 0.9}

RESET = "default"


# What each setting does, for those who choose one.
SETTINGS: Mapping[str, str] = {
    "temperature": "0 is greedy, 2 the wildest",
    "top_p": "sample from the likeliest tokens that together reach this probability",
    "top_k": "sample from this many likeliest tokens; 0 is off",
    "min_p": "drop tokens below this fraction of the likeliest one's probability",
    "max_tokens": "longest answer, in tokens",
    "min_tokens": "shortest answer, in tokens",
    "presence_penalty": "penalty on tokens that the answer has already",
    "frequency_penalty": "the same, for each time that it has them",
    "repetition_penalty": "divides the scores of tokens in prompt or answer; 1 is off",
    "seed": "the same seed gives the same answer",
    "stop": 'end the answer before this text, or one of a JSON list: ["\\n\\n", "END"]',
}


def parse_setting(name: str, text: str) -> Any:
    """The value of a setting given as text. Raises `ChatError`, saying what is allowed."""
    if name not in SETTINGS:
        raise ChatError(f"there is no setting {name!r}; choose one of {', '.join(SETTINGS)}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if name == "stop":
        value = value if isinstance(value, list) else [value if isinstance(value, str) else text]
    check_settings({name: value})
    return value


def check_settings(values: Mapping[str, Any]) -> None:
    """Raises `ChatError` for a name that is no setting, or a value out of range."""
    for name in values:
        if name not in SETTINGS:
            raise ChatError(f"there is no setting {name!r}; choose one of {', '.join(SETTINGS)}")
    try:
        SamplingParams(**values)
    except InvalidRequestError as error:
        raise ChatError(error.message) from None


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """The parameters of one answer: what was set, over the defaults of chat."""
    return SamplingParams(**{**DEFAULTS, **values})
