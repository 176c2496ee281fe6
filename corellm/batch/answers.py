"""What becomes of a row: the engine's answer, or its refusal, worded as a line of the output."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from uuid import uuid4

from corellm.batch.engine_api import Generator, Vocabulary
from corellm.batch.journal import answer_row, error_row
from corellm.batch.prepare import PreparedRow, RefusedRow
from corellm.batch.rows import Row, RowError
from corellm.errors import CoreLLMError, InvalidRequestError, RequestFailedError
from corellm.openai_api.responses import Head, error_body, error_status, response_body
from corellm.openai_api.results import Completion, TokenBytes

BATCH_PRIORITY = 1  # behind interactive requests, which have 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a row: its output line, why it failed if it did, and the tokens it took."""

    line: int
    custom_id: str | None
    output: bytes
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def refused(outcome: RefusedRow | RowError) -> Answer:
    """The end of a row that never ran."""
    if isinstance(outcome, RefusedRow):
        return _failed(outcome.row, outcome.error)
    output = error_row(outcome.line, outcome.crc, outcome.custom_id, outcome.code, outcome.message)
    return Answer(outcome.line, outcome.custom_id, output, error=outcome.message)


def _failed(row: Row, error: CoreLLMError) -> Answer:
    body = error_body(error, prefix=f"line {row.line}: ")
    output = answer_row(row.line, row.crc, row.custom_id, error_status(error), _request_id(), body)
    return Answer(row.line, row.custom_id, output, error=error.message)


class Answerer:
    """Runs prepared rows on an engine, at most `seats` prompts at once over all rows."""

    def __init__(self, engine: Generator, vocabulary: Vocabulary | None, model: str, seats: int) -> None:
        self._engine = engine
        self._token_bytes: TokenBytes = vocabulary.token_bytes if vocabulary else _nameless
        self._model = model
        self._seats = asyncio.Semaphore(seats)

    async def answer(self, prepared: PreparedRow) -> Answer:
        """Run a row to its end. A failure of the row is an answer; `EngineDeadError` is raised."""
        row = prepared.row
        try:
            groups = await self._complete_all(prepared)
        except (InvalidRequestError, RequestFailedError) as error:
            return _failed(row, error)
        head = Head.new(row.endpoint, self._model)
        body = response_body(prepared.request, head, groups, self._token_bytes)
        used = body["usage"]
        return Answer(
            row.line,
            row.custom_id,
            answer_row(row.line, row.crc, row.custom_id, 200, _request_id(), body),
            prompt_tokens=used["prompt_tokens"],
            cached_tokens=used["prompt_tokens_details"]["cached_tokens"],
            output_tokens=used["completion_tokens"],
        )

    async def _complete_all(self, prepared: PreparedRow) -> Sequence[Sequence[Completion]]:
        """The answers, [prompt][choice]. Raises the gravest error only when none of them runs any more."""
        n = prepared.request.generation.n
        tasks: list[asyncio.Task[Completion]] = []
        try:
            for index, choice in product(range(len(prepared.prompts)), range(n)):
                # The seat comes before the task: however many answers a row asks for, no more tasks run than seats.
                await self._seats.acquire()
                tasks.append(asyncio.create_task(self._complete(prepared, index, choice)))
                tasks[-1].add_done_callback(self._leave_seat)
            results = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise next(
                (error for error in errors if not isinstance(error, InvalidRequestError | RequestFailedError)),
                errors[0],
            )
        done = [result for result in results if not isinstance(result, BaseException)]
        return [done[start : start + n] for start in range(0, len(done), n)]

    async def _complete(self, prepared: PreparedRow, index: int, choice: int) -> Completion:
        generation = prepared.request.generation
        return await self._engine.complete(
            prepared.prompts[index],
            generation.choice_params(choice),
            priority=max(BATCH_PRIORITY, generation.priority or 0),
            cache_salt=generation.cache_salt,
        )

    def _leave_seat(self, _: asyncio.Task[Completion]) -> None:
        self._seats.release()


def _nameless(token_id: int) -> bytes:
    """How a token is written when there is no tokenizer."""
    return b"token_id:%d" % token_id


def _request_id() -> str:
    return f"req_{uuid4().hex}"
