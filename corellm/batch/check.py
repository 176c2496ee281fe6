"""Every row of an input validated and counted, with nothing run: `--dry-run`, and what `--strict` does first."""

from __future__ import annotations

import time
from collections.abc import Callable

from corellm.batch.answers import refused
from corellm.batch.lines import STAGE, Report, Source
from corellm.batch.options import BatchOptions
from corellm.batch.prepare import Pipeline, PreparedRow, Preparer, RefusedRow
from corellm.batch.progress import Event, RowEnded, SharedId, Summary
from corellm.batch.rows import RowError
from corellm.comms.messages import Progress
from corellm.errors import BatchError
from corellm.openai_api.prompts import Encoder, ModelLimits

REPORT_ROWS = 256  # between two reports


class InputCheck:
    """Validates and tokenises every row of an input; `run` may be called once."""

    def __init__(
        self,
        encoder: Encoder,
        limits: ModelLimits,
        source: Source,
        options: BatchOptions,
        events: Callable[[Event], None],
    ) -> None:
        self._pipeline = Pipeline(source, Preparer(encoder, limits, options.defaults), limit=options.limit)
        self._strict = options.strict
        self._events = events
        self._started = time.monotonic()
        self._ok = self._failed = self._prompt_tokens = 0

    def run(self, report: Report, total: int | None = None) -> None:
        """Check all rows, of which there are `total`; an event for each.

        Raises `BatchError`, naming the line, at the first row that cannot run under `strict`.
        """
        self._say(report, total)
        for outcome in self._pipeline:
            if not isinstance(outcome, RowError) and outcome.row.shared:
                self._events(SharedId(outcome.row.line, outcome.row.custom_id))
            if isinstance(outcome, PreparedRow):
                self._ok += 1
                self._prompt_tokens += outcome.prompt_tokens
                self._events(RowEnded(outcome.row.line, outcome.row.custom_id, None))
            else:
                self._failed += 1
                if self._strict:
                    raise bad_row(outcome)
                answer = refused(outcome)
                self._events(RowEnded(answer.line, answer.custom_id, answer.error))
            if self._pipeline.rows % REPORT_ROWS == 0:
                self._say(report, total)
        self._say(report, total)

    def _say(self, report: Report, total: int | None) -> None:
        report(Progress(stage=STAGE, detail="check", done=self._pipeline.rows, total=total or 0, unit="rows"))

    def summary(self, failed_with: str | None = None) -> Summary:
        """What it came to so far."""
        return Summary(
            ok=self._ok,
            failed=self._failed,
            prompt_tokens=self._prompt_tokens,
            wall_s=time.monotonic() - self._started,
            failed_with=failed_with,
        )


def bad_row(outcome: RefusedRow | RowError) -> BatchError:
    """What `--strict` says of a row that cannot run."""
    answer = refused(outcome)
    return BatchError(f"--strict: line {answer.line}: {answer.error}")
