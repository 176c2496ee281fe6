"""From a line of the input to token ids that the engine can run, or to the error row that the line gets instead."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from corellm.batch.engine_api import Encoder, ModelLimits
from corellm.batch.lines import Source
from corellm.batch.recovery import FinishedRows
from corellm.batch.rows import Row, RowError, read_rows
from corellm.errors import BatchError, InvalidRequestError, PromptTooLongError
from corellm.openai_api.fields import Endpoint
from corellm.openai_api.requests import ChatRequest, CompletionRequest, Generation, parse_request


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row that can run. `prompts` are token ids, 4 bytes each; every prompt is answered `generation.n` times."""

    row: Row
    prompts: Sequence[array[int]]
    generation: Generation

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row whose body is refused: answered like HTTP's 400."""

    row: Row
    error: InvalidRequestError


Outcome = PreparedRow | RefusedRow | RowError


class Preparer:
    """Validates and tokenises rows. `defaults` are OpenAI fields that hold where a row does not say.

    Raises `InvalidRequestError` when a default is out of range.
    """

    def __init__(self, encoder: Encoder, limits: ModelLimits, defaults: Mapping[str, Any]) -> None:
        self._encoder = encoder
        self._limits = limits
        self._defaults = {name: value for name, value in defaults.items() if value is not None}
        parse_request(Endpoint.COMPLETIONS, {"prompt": ""}, self._defaults)

    def prepare(self, row: Row) -> PreparedRow | RefusedRow:
        """A row as the engine runs it, or why it cannot."""
        try:
            request = parse_request(row.endpoint, row.body, self._defaults)
            if request.generation.stream:
                raise InvalidRequestError("stream is true; a batch writes whole answers: leave it out", "stream")
            prompts = [array("i", ids) for ids in self._encode(request)]
            field = "prompt" if isinstance(request, CompletionRequest) else "messages"
            for prompt in prompts:
                self._check_length(len(prompt), request.generation.params.max_tokens, field)
                self._check_ids(field, prompt)
            self._check_ids("logit_bias", request.generation.params.logit_bias)
            self._check_ids("stop_token_ids", request.generation.params.stop_token_ids)
        except InvalidRequestError as error:
            return RefusedRow(row, error)
        return PreparedRow(row, prompts, request.generation)

    def _encode(self, request: ChatRequest | CompletionRequest) -> Iterator[Sequence[int]]:
        if isinstance(request, CompletionRequest):
            yield from map(self._encoder.encode_prompt, request.prompts)
            return
        yield self._encoder.encode_chat(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )

    def _check_length(self, prompt_tokens: int, max_tokens: int | None, field: str) -> None:
        limit = self._limits.max_request_tokens
        if not prompt_tokens:
            raise InvalidRequestError(f"{field} has no tokens; give at least one", field)
        if prompt_tokens + (max_tokens or 1) <= limit:
            return
        if max_tokens is None or prompt_tokens >= limit:
            raise PromptTooLongError(
                f"the prompt has {prompt_tokens} tokens; with at least one of output, a request may have {limit}: "
                "shorten the prompt",
                field,
            )
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, {prompt_tokens + max_tokens} "
            f"together; a request may have {limit}: lower max_tokens or shorten the prompt",
            "max_tokens",
        )

    def _check_ids(self, field: str, ids: Iterable[int]) -> None:
        vocab = self._limits.vocab
        highest = max(ids, default=0)
        if highest >= vocab:
            raise InvalidRequestError(f"{field} names token {highest}; the model's ids end at {vocab - 1}", field)


class Pipeline:
    """The rows of an input, prepared one by one; those in `finished` are skipped.

    Iterated in one thread, while any other may read the counts. Raises `BatchError` when the input is not the one that
    the finished rows are of.
    """

    def __init__(
        self, source: Source, preparer: Preparer, *, limit: int | None = None, finished: FinishedRows | None = None
    ) -> None:
        self.rows = 0
        self.skipped = 0
        self.skipped_failed = 0  # of these, the error rows
        self._source = source
        self._preparer = preparer
        self._limit = limit
        self._finished = FinishedRows() if finished is None else finished

    def __iter__(self) -> Iterator[Outcome]:
        for row in islice(read_rows(self._source.lines()), self._limit):
            self.rows += 1
            if row.line in self._finished:
                self._skip(row)
            elif isinstance(row, RowError):
                yield row
            else:
                yield self._preparer.prepare(row)
        if self._limit is None and self.skipped < self._finished.count:
            missing = self._finished.count - self.skipped
            raise BatchError(
                f"the input {self._source.name} ends before {missing} of the rows that the output answers: it was cut; "
                "use --restart to begin anew, or -o to write elsewhere"
            )

    def _skip(self, row: Row | RowError) -> None:
        if self._finished.crc(row.line) != row.crc:
            raise BatchError(
                f"line {row.line} of {self._source.name} has changed since the output answered it; "
                "use --restart to begin anew, or -o to write elsewhere"
            )
        self.skipped += 1
        self.skipped_failed += self._finished.failed(row.line)
