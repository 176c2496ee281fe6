"""What this package needs to know of an engine's answer: the shape that `TextEngine.complete` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

TokenBytes = Callable[[int], bytes]


class TokenLogprob(Protocol):
    """The natural-log probability of one output token, and of the likeliest ones in its place."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> Sequence[tuple[int, float]]: ...


class PromptLogprob(Protocol):
    """The same of a prompt's token, with its rank among all. The first has neither: nothing comes before it."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def top(self) -> Sequence[tuple[int, float]]: ...


class Completion(Protocol):
    """One finished answer to one prompt."""

    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprob] | None: ...
    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprob] | None: ...


class Delta(Protocol):
    """What an answer gained since the last one; `end` is set on the last."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprob]: ...
    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprob] | None: ...
    @property
    def end(self) -> Completion | None: ...
