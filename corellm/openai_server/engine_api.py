"""What the server needs of an engine and its text side: `TextEngine` has it, and so have the tests' fakes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Protocol

from corellm.comms.messages import EngineInfo, Stats
from corellm.errors import CoreLLMError
from corellm.openai_api.prompts import Encoder
from corellm.sampling_params import SamplingParams
from corellm.text_engine import Completion, Delta


class Vocabulary(Protocol):
    """Tokens as bytes and as text. Threads may share one."""

    def token_bytes(self, id: int, /) -> bytes: ...
    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]: ...
    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str: ...
    @property
    def adds_bos(self) -> bool: ...


class Engine(Encoder, Protocol):
    """A ready engine."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def tokenizer(self) -> Vocabulary | None: ...

    async def complete(
        self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> Completion: ...

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> AsyncGenerator[Delta, None]: ...

    def abort_all(self) -> None: ...
    def latest_stats(self) -> Stats | None: ...
    async def died(self) -> CoreLLMError: ...
