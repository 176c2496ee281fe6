"""A stand-in for `TextEngine`: tokens are bytes, and an answer is a pure function of prompt and parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from corellm.comms.messages import EngineInfo
from corellm.errors import CoreLLMError, InvalidRequestError
from corellm.sampling_params import SamplingParams
from corellm.text_engine import Completion, TokenLogprob

VOCAB = 256
MAX_MODEL_LEN = 200


def engine_info(max_seqs: int = 4) -> EngineInfo:
    return EngineInfo(
        name="fake",
        model="fake-model",
        model_path="/fake",
        dtype="float32",
        device="cpu",
        tp=1,
        kv_cache="radix",
        page_size=16,
        kv_blocks=1000,
        max_model_len=MAX_MODEL_LEN,
        max_batch_tokens=256,
        max_seqs=max_seqs,
        vocab=VOCAB,
        seed=0,
        load_format="dummy",
        max_request_tokens=MAX_MODEL_LEN,
        startup_s=0.0,
    )


class ByteTokenizer:
    def token_bytes(self, token_id: int, /) -> bytes:
        return bytes([token_id])


class FakeTextEngine:
    """`delay` gives the seconds a prompt takes, `failure` the error it ends in, if any."""

    def __init__(
        self,
        *,
        max_seqs: int = 4,
        delay: Callable[[str], float] = lambda prompt: 0.0,
        failure: Callable[[str], CoreLLMError | None] = lambda prompt: None,
    ) -> None:
        self.info = engine_info(max_seqs)
        self.tokenizer = ByteTokenizer()
        self.calls: list[tuple[str, SamplingParams, int, str]] = []
        self.running = self.peak = self.cancelled = 0
        self._delay, self._failure = delay, failure

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        for index, message in enumerate(messages):
            if message.get("role") not in ("system", "user", "assistant"):
                raise InvalidRequestError(f"messages[{index}].role is unknown", f"messages[{index}].role")
        text = "|".join(f"{message['role']}:{message['content']}" for message in messages)
        return list((text + ("|assistant:" if add_generation_prompt else "")).encode())

    async def complete(
        self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> Completion:
        text = bytes(list(prompt)).decode()  # of an array, bytes() would be its memory
        self.calls.append((text, params, priority, cache_salt))
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(self._delay(text))
            if (error := self._failure(text)) is not None:
                raise error
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return answer(text, params)


def answer(prompt: str, params: SamplingParams) -> Completion:
    ids = f"<{prompt}>".encode()[: params.max_tokens or 1000]
    top = params.logprobs
    return Completion(
        text=ids.decode(),
        token_ids=tuple(ids),
        finish_reason="stop" if len(ids) == len(prompt) + 2 else "length",
        stop_reason=None,
        prompt_tokens=len(prompt),
        cached_tokens=len(prompt) // 2,
        output_tokens=len(ids),
        logprobs=None
        if top is None
        else tuple(TokenLogprob(i, -0.5, tuple((i ^ k, -0.5 - k) for k in range(top))) for i in ids),
        queued_s=0.0,
        first_token_s=0.0,
        total_s=0.0,
        preemptions=0,
    )
