"""From a line of the input to token ids that the engine can run, or to the error row that the line gets instead."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from corellm.batch.lines import Source
from corellm.batch.recovery import FinishedRows
from corellm.batch.rows import Row, RowError, read_rows
from corellm.errors import BatchError, InvalidRequestError
from corellm.openai_api.fields import Endpoint
from corellm.openai_api.prompts import Encoder, ModelLimits, encode_request
from corellm.openai_api.requests import ChatRequest, CompletionRequest, parse_request


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row that can run. `prompts` are token ids, 4 bytes each; every prompt is answered `n` times."""

    row: Row
    prompts: Sequence[array[int]]
    request: ChatRequest | CompletionRequest

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
            prompts = encode_request(request, self._encoder, self._limits)
        except InvalidRequestError as error:
            return RefusedRow(row, error)
        return PreparedRow(row, prompts, request)


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
