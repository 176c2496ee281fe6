"""Text in, text out, over one engine: what batch, chat, serve and `EngineNode` have in common."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from corellm.comms.messages import NO_TOKEN, EngineInfo, Finish, Logprobs, Progress, PromptLogprobs, Sampling, Stats
from corellm.comms.run_folder import RunFolder
from corellm.engine.engine_client import EngineClient
from corellm.errors import CoreLLMError, InvalidRequestError, PromptTooLongError
from corellm.found_model import FoundModel
from corellm.sampling_params import SamplingParams
from corellm.text.assembler import TextAssembler
from corellm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one output token, and of the likeliest ones at its position: (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """The same of one prompt token, and its rank: how many are at least as likely, itself included.

    The first token has neither, since nothing comes before it.
    """

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request. `finish_reason` is "stop" or "length"; `stop_reason` is the stop string or id.

    Times are seconds from the request's arrival at the engine.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None
    queued_s: float
    first_token_s: float
    total_s: float
    preemptions: int
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None  # of every prompt token


@dataclass(slots=True, kw_only=True)
class Delta:
    """What came since the last one. `end` is set on the last."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None  # with the first one, if they were asked for
    end: Completion | None = None


class TextEngine:
    """An engine with its model's text side. One asyncio loop; make it with `start` or `attach`, end it with `close`."""

    def __init__(self, client: EngineClient, info: EngineInfo, model: FoundModel) -> None:
        self.info = info
        self.model = model
        self.tokenizer = model.tokenizer
        self.encode_prompt = model.encode_prompt
        self.encode_chat = model.encode_chat
        self._client = client

    @classmethod
    async def start(cls, model: FoundModel, report: Callable[[Progress], None]) -> TextEngine:
        """Start an engine of our own on a model, and wait until it is ready.

        Raises the typed error of whatever stands in the way.
        """
        client = await EngineClient.launch(model.launch, report)
        return cls(client, await client.ready(), model)

    @classmethod
    async def attach(cls, folder: RunFolder, model: FoundModel, report: Callable[[Progress], None]) -> TextEngine:
        """Join a running engine, whose model `model` must be; `close` leaves it running.

        Raises `EngineDeadError` when it runs no more.
        """
        client = await EngineClient.connect(folder, report)
        return cls(client, await client.ready(), model)

    @property
    def folder(self) -> RunFolder:
        """The engine's run folder, by which others may join it."""
        return self._client.folder

    @property
    def death(self) -> CoreLLMError | None:
        """What ended the engine or the connection; None while both stand. Threads may ask."""
        return self._client.death

    async def died(self) -> CoreLLMError:
        """Wait for the end of the engine, and return what ended it."""
        return await self._client.died()

    async def close(self) -> None:
        await self._client.close()

    # ---- generation -----------------------------------------------------------------------------------------------

    async def complete(
        self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> Completion:
        """One prompt to its end. Cancelling the task aborts the request.

        Raises `InvalidRequestError` when the request is refused, `RequestFailedError` when it fails alone,
        `EngineDeadError` when the engine is gone.
        """
        async with aclosing(self.stream(prompt, params, priority=priority, cache_salt=cache_salt)) as deltas:
            async for delta in deltas:
                if delta.end is not None:
                    return delta.end
        raise RuntimeError("a stream ended without its end")

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> AsyncGenerator[Delta, None]:
        """The same in pieces. Closing the generator aborts the request."""
        sampling = self._resolve(prompt, params)
        stream = self._client.submit(
            prompt, sampling, priority=priority, cache_salt=cache_salt, constraint=params.constraint
        )
        output = _Output(self.tokenizer, params, prompt)
        try:
            async for batch in stream:
                finish = batch.finish
                output.score_prompt(batch.prompt_logprobs)
                delta = output.push(batch.tokens, batch.logprobs, finish)
                if output.stop is not None and finish is None:
                    finish = await stream.end()  # the engine has not ended it; it knows the figures
                if finish is not None:
                    delta.end = output.completion(finish)
                if delta.text or delta.token_ids or delta.end is not None:
                    yield delta
                if delta.end is not None:
                    return
        finally:
            stream.abort()

    def abort_all(self) -> None:
        """Abort every open request of this front end; whoever waits for one gets `RequestAbortedError`."""
        self._client.abort_all()

    def latest_stats(self) -> Stats | None:
        """The last snapshot that the engine published."""
        return self._client.latest_stats

    async def stats(self) -> Stats:
        return await self._client.stats()

    def _resolve(self, prompt: Sequence[int], params: SamplingParams) -> Sampling:
        room = self.info.max_request_tokens - len(prompt)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens; with one token of output at most "
                f"{self.info.max_request_tokens} fit: shorten it",
                "prompt",
            )
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer, and the model has none; use stop_token_ids", "stop"
            )
        stop_ids = set(params.stop_token_ids) if params.ignore_eos else self.model.eos_ids | set(params.stop_token_ids)
        return Sampling(
            max_tokens=params.max_tokens or room,
            min_tokens=params.min_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            stop_ids=tuple(sorted(stop_ids)),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            bias_ids=tuple(params.logit_bias),
            bias_values=tuple(params.logit_bias.values()),
        )


class _Output:
    """Collects one request's tokens into text, and cuts them at a stop string (`stop`, once it is found)."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.stop: str | None = None
        self._assembler = TextAssembler(tokenizer, params) if tokenizer is not None else None
        self._top = params.logprobs
        self._prompt = prompt
        self._prompt_top = params.prompt_logprobs
        self._prompt_logprobs = [PromptLogprob(prompt[0])] if params.prompt_logprobs is not None else []
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def push(self, tokens: list[int], logprobs: list[Logprobs], finish: Finish | None) -> Delta:
        text = ""
        if self._assembler is not None:
            piece = self._assembler.push(tokens, ended_by_stop_id=_stop_id(finish) is not None)
            text, self.stop = piece.text, self._assembler.stop
            tokens = tokens[: piece.tokens]
            if self.stop is not None or finish is not None:
                text += self._assembler.finish()
        top = self._top or 0
        found = [_token_logprob(token, entry, top) for token, entry in zip(tokens, logprobs, strict=False)]
        self._text.append(text)
        self._logprobs += found
        prompt = None if self._tokens or self._prompt_top is None else tuple(self._prompt_logprobs)
        self._tokens += tokens
        return Delta(text=text, token_ids=tokens, logprobs=found, prompt_logprobs=prompt)

    def score_prompt(self, scores: list[PromptLogprobs]) -> None:
        """Take in log-probabilities of the prompt's tokens, in order of position."""
        for found in scores:
            shape, top = (len(found.logprobs), found.k), self._prompt_top or 0
            ids, values = found.top_ids.reshape(shape)[:, :top], found.top_logprobs.reshape(shape)[:, :top]
            tokens = self._prompt[found.first : found.first + len(found.logprobs)]
            columns = zip(
                tokens, found.logprobs.tolist(), found.ranks.tolist(), ids.tolist(), values.tolist(), strict=True
            )
            self._prompt_logprobs += [
                PromptLogprob(token, logprob, rank, tuple(zip(top_ids, top_values, strict=True)))
                for token, logprob, rank, top_ids, top_values in columns
            ]

    def completion(self, finish: Finish) -> Completion:
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self._tokens),
            finish_reason="stop" if self.stop is not None else finish.reason,
            stop_reason=self.stop if self.stop is not None else _stop_id(finish),
            prompt_tokens=finish.prompt_tokens,
            cached_tokens=finish.cached_tokens,
            output_tokens=len(self._tokens),
            logprobs=tuple(self._logprobs) if self._top is not None else None,
            prompt_logprobs=tuple(self._prompt_logprobs) if self._prompt_top is not None else None,
            queued_s=finish.queued_s,
            first_token_s=finish.first_token_s,
            total_s=finish.total_s,
            preemptions=finish.preemptions,
        )


def _stop_id(finish: Finish | None) -> int | None:
    return None if finish is None or finish.stop_id == NO_TOKEN else finish.stop_id


def _token_logprob(token: int, found: Logprobs, top: int) -> TokenLogprob:
    pairs = zip(found.top_ids.tolist()[:top], found.top_logprobs.tolist()[:top], strict=True)
    return TokenLogprob(token, found.logprob, tuple(pairs))
