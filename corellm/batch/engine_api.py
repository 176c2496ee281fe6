"""What the batch needs of an engine and its text side: `TextEngine` has it, and so have the tests' fakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from corellm.comms.messages import EngineInfo
from corellm.openai_api.prompts import Encoder
from corellm.openai_api.results import Completion
from corellm.sampling_params import SamplingParams


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
