"""What the batch needs of an engine and its text side: `TextEngine` has it, and so have the tests' fakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from corellm.comms.messages import EngineInfo
from corellm.openai_api.results import Completion
from corellm.sampling_params import SamplingParams


class Encoder(Protocol):
    """Prompts to token ids; raises `InvalidRequestError`. Called from a thread of the batch's own."""

    def encode_prompt(self, prompt: str | Sequence[int]) -> Sequence[int]: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Sequence[int]: ...


class Generator(Protocol):
    """Runs one prompt to its end; cancelling the task aborts the request.

    Raises `InvalidRequestError`, `RequestFailedError`, and `EngineDeadError` when everything is over.
    """

    async def complete(
        self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> Completion: ...


class Vocabulary(Protocol):
    """Tokens as bytes."""

    def token_bytes(self, token_id: int, /) -> bytes: ...


class Engine(Encoder, Generator, Protocol):
    """All of them, and what it says of itself."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def tokenizer(self) -> Vocabulary | None: ...


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request must fit: prompt + output tokens, and ids below the vocabulary's size."""

    max_request_tokens: int
    vocab: int

    @classmethod
    def of(cls, info: EngineInfo) -> ModelLimits:
        return cls(info.max_request_tokens, info.vocab)
