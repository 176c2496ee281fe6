"""What this package needs to know of an engine's answer: the shape that `TextEngine.complete` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOnly:
    """A `Completion` that ends where its prompt does."""

    prompt_tokens: int
    cached_tokens: int
    logprobs: Sequence[TokenLogprob] | None  # none, or None where none were asked for
    prompt_logprobs: Sequence[PromptLogprob] | None
    text: str = ""
    finish_reason: str = "length"
    output_tokens: int = 0

    @classmethod
    def of(cls, completion: Completion) -> PromptOnly:
        """What is left of it without all that was generated."""
        return cls(
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            logprobs=None if completion.logprobs is None else (),
            prompt_logprobs=completion.prompt_logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOnlyDelta:
    """A `Delta` of such an answer."""

    prompt_logprobs: Sequence[PromptLogprob] | None
    end: Completion | None
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()

    @classmethod
    def of(cls, delta: Delta) -> PromptOnlyDelta:
        """What is left of it without all that was generated."""
        return cls(prompt_logprobs=delta.prompt_logprobs, end=None if delta.end is None else PromptOnly.of(delta.end))
