"""How one request is sampled: the public parameters, range-checked once, before anything is queued."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from reprlib import repr as shown  # a value in an error message may be of any length
from typing import Any

from corellm.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_SCHEMA_CHARS = 131_072


@dataclass(frozen=True, slots=True)
class JsonConstraint:
    """What an answer must be: one JSON value of `schema`, or with a `separator` one or more of them.

    `schema` is a JSON schema as text. A keyword of it that cannot be held to is refused, or with `lenient` ignored.
    `param` is the field of the request that an error about it names.
    """

    schema: str
    separator: str = ""
    lenient: bool = False
    param: str = "response_format"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request. The names and meanings are OpenAI's and vLLM's.

    Raises `InvalidRequestError`, naming the field, when a value is out of range.
    """

    max_tokens: int | None = None  # None: as many as fit the context
    min_tokens: int = 0  # stop ids are masked until this many tokens are out
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over output tokens
    frequency_penalty: float = 0.0  # over output tokens
    repetition_penalty: float = 1.0  # over prompt and output tokens
    seed: int | None = None  # None: the engine draws one
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; 0: the sampled token's; k: also the k likeliest
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, which are then computed whole
    logit_bias: dict[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True
    constraint: JsonConstraint | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple("stop", stop, "a string or a list of strings"))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids, "a list of token ids"))
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower min_tokens", "min_tokens"
            )
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.constraint is not None:
            self._check_constraint(self.constraint)
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop"
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"stop holds {text!r}; each entry must be a non-empty string", "stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; it may have {MAX_STOP_TOKEN_IDS}", "stop_token_ids"
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)

    def _check_constraint(self, constraint: object) -> None:
        if not isinstance(constraint, JsonConstraint):
            raise InvalidRequestError(
                f"constraint is {shown(constraint)}; it must be a JsonConstraint or None", "constraint"
            )
        size = len(constraint.schema)
        if size > MAX_SCHEMA_CHARS:
            raise InvalidRequestError(
                f"{constraint.param} makes a JSON schema of {size} characters; at most {MAX_SCHEMA_CHARS} are allowed",
                constraint.param,
            )
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise InvalidRequestError(
                    f"{name} is given, but an answer held to {constraint.param} ends where its JSON does; "
                    "leave one of them out",
                    name,
                )

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias is {shown(self.logit_bias)}; it must be a mapping of token ids to numbers", "logit_bias"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed", "logit_bias"
            )
        for token, bias in self.logit_bias.items():
            _integer("logit_bias key", token, 0, 2**31 - 1, param="logit_bias")
            _number("logit_bias value", bias, -100.0, 100.0, param="logit_bias")


FIELDS = tuple(f.name for f in fields(SamplingParams))


def _tuple(name: str, value: object, allowed: str) -> tuple[Any, ...]:
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be {allowed}", name)
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int, param: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} is {value!r}; it must be an integer from {low} to {high}", param or name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value}; it must be from {low} to {high}", param or name)


def _number(
    name: str, value: object, low: float, high: float, *, low_open: bool = False, param: str | None = None
) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if low < value <= high or (value == low and not low_open):
            return
        shown = f"{value:g}"
    else:
        shown = repr(value)
    span = f"{'above' if low_open else 'from'} {low:g} {'and at most' if low_open else 'to'} {high:g}"
    raise InvalidRequestError(f"{name} is {shown}; it must be a number {span}", param or name)
