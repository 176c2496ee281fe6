"""Runs the rows of an input on an engine: admission, order, interruption and the death of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from corellm.batch.answers import Answer, Answerer, refused
from corellm.batch.engine_api import Encoder, Engine, ModelLimits
from corellm.batch.feed import Feed
from corellm.batch.journal import Journal
from corellm.batch.lines import Source
from corellm.batch.ordering import OutputOrder
from corellm.batch.prepare import Pipeline, PreparedRow, Preparer, checked
from corellm.batch.progress import Event, RowEnded, RowsChecked, Snapshot, Stopping, Summary
from corellm.errors import BatchError, EngineDeadError, OptionError

ORDERS = ("completion", "input")
MAX_TOKENS_IN_FLIGHT = 1 << 24  # prompt tokens of admitted rows: 64 MiB
FEED_DEPTH = 64  # rows tokenised ahead of admission
HELD_BACK = 8  # rows held back for input order, as a multiple of those in flight
SYNC_INTERVAL_S = 5.0

Events = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How to run. `defaults` are OpenAI fields that hold where a row does not say.

    Raises `OptionError` when an option is out of range.
    """

    order: str = "completion"
    limit: int | None = None  # rows; None: all
    strict: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_in_flight: int | None = None  # rows; None: twice what the engine runs at once, so that it never starves
    grace_s: float = 5.0  # for rows in flight after a stop is requested

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise OptionError(f"--order is {self.order!r}; choose one of {', '.join(ORDERS)}")
        for name, value in (("--limit", self.limit), ("max_in_flight", self.max_in_flight)):
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}; it must be at least 1")

    def settings(self) -> dict[str, Any]:
        """What of this shapes the output, for its fingerprint."""
        return {"order": self.order, **{name: value for name, value in self.defaults.items() if value is not None}}


class BatchRunner:
    """One run over one input. `run` may be called once; the journal stays the caller's to close."""

    def __init__(
        self,
        engine: Engine,
        source: Source,
        journal: Journal,
        options: BatchOptions,
        events: Events,
        *,
        total: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._journal, self._options, self._events = source, journal, options, events
        self._clock = clock
        self._started = clock()
        self._total = total if total is None or options.limit is None else min(total, options.limit)
        self._preparer = Preparer(engine, ModelLimits.of(engine.info), options.defaults)
        self._pipeline = Pipeline(source, self._preparer, limit=options.limit, finished=journal.finished)
        self._max_in_flight = options.max_in_flight or 2 * engine.info.max_seqs
        self._answerer = Answerer(engine, engine.tokenizer, engine.info.model, self._max_in_flight)
        self._order = OutputOrder[Answer](by_input=options.order == "input", window=HELD_BACK * self._max_in_flight)
        self._ok = self._failed = 0
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._open: dict[asyncio.Task[None], int] = {}  # running rows: their prompt tokens
        self._room = asyncio.Event()
        self._admission: asyncio.Task[None] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._stopping = False  # by the user
        self._cancelled = False
        self._fatal: BaseException | None = None

    async def run(self) -> Summary:
        """Run every row that the journal does not have yet.

        Raises `BatchError` when the input or the output fails, or at the first bad row under `strict`;
        `EngineDeadError` when the engine dies. Rows that were in flight then have no output line: they run again when
        the run is resumed.
        """
        self._started = self._clock()
        self._admission = asyncio.create_task(self._admit_all())
        syncing = asyncio.create_task(self._sync_regularly())
        if self._stopping:
            self._admission.cancel()
        try:
            await asyncio.wait([self._admission])
            if not self._admission.cancelled() and (error := self._admission.exception()) is not None:
                self._abandon(error)
            while self._open:
                await asyncio.wait(self._open)
        finally:
            syncing.cancel()
            if self._grace is not None:
                self._grace.cancel()
            self._cancel_all()
            await asyncio.gather(self._admission, syncing, *self._open, return_exceptions=True)
        if self._fatal is not None:
            raise self._fatal
        return self._summary()

    def request_stop(self) -> None:
        """Admit no more rows; give those in flight the grace, then cancel them. Call it in the event loop."""
        if self._stopping:
            return
        self._stopping = True
        if self._admission is not None:
            self._admission.cancel()
        self._grace = asyncio.get_running_loop().call_later(self._options.grace_s, self.stop_now)
        self._events(Stopping(len(self._open), self._options.grace_s))

    def stop_now(self) -> None:
        """Admit no more rows and cancel those in flight. Call it in the event loop."""
        self._stopping = True
        self._cancel_all()

    def _cancel_all(self) -> None:
        self._cancelled = True
        for task in (self._admission, *self._open):
            if task is not None:
                task.cancel()

    def snapshot(self) -> Snapshot:
        return Snapshot(
            total=self._total,
            ok=self._ok,
            failed=self._failed,
            skipped=self._pipeline.skipped,
            in_flight=len(self._open),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            elapsed_s=self._clock() - self._started,
            stopping=self._stopping,
        )

    def _summary(self) -> Summary:
        end = self.snapshot()
        return Summary(
            ok=end.ok,
            failed=end.failed,
            skipped=end.skipped,
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            output_tokens=end.output_tokens,
            wall_s=end.elapsed_s,
            output=self._journal.name,
            interrupted=self._stopping,
        )

    async def _admit_all(self) -> None:
        if self._options.strict:
            await self._check_all()
        feed = Feed(self._pipeline, FEED_DEPTH)
        try:
            async for outcome in feed:
                await self._wait_for_room()
                place = self._order.admit()
                if isinstance(outcome, PreparedRow):
                    task = asyncio.create_task(self._run_row(place, outcome))
                    self._open[task] = outcome.prompt_tokens
                    task.add_done_callback(self._row_left)
                else:
                    self._deliver(place, refused(outcome))
        finally:
            feed.close()

    async def _check_all(self) -> None:
        """Validate the whole input before anything is generated."""

        def rows() -> Iterator[int]:
            self._source.spool()
            yield from checked(Pipeline(self._source, self._preparer, limit=self._options.limit))

        feed = Feed(rows(), FEED_DEPTH)
        try:
            async for count in feed:
                self._events(RowsChecked(count))
        finally:
            feed.close()

    async def _wait_for_room(self) -> None:
        while (
            len(self._open) >= self._max_in_flight
            or self._order.full
            or sum(self._open.values()) >= MAX_TOKENS_IN_FLIGHT
        ):
            self._room.clear()
            await self._room.wait()

    async def _run_row(self, place: int, prepared: PreparedRow) -> None:
        self._deliver(place, await self._answerer.answer(prepared))

    def _row_left(self, task: asyncio.Task[None]) -> None:
        del self._open[task]
        self._room.set()
        if task.cancelled():
            if not self._cancelled:
                self._abandon(EngineDeadError("the engine dropped a request without an answer; run the batch again"))
        elif (error := task.exception()) is not None:
            self._abandon(error)

    def _deliver(self, place: int, answer: Answer) -> None:
        for ready in self._order.finish(place, answer):
            self._journal.append(ready.output)
            if ready.error is None:
                self._ok += 1
            else:
                self._failed += 1
            self._prompt_tokens += ready.prompt_tokens
            self._cached_tokens += ready.cached_tokens
            self._output_tokens += ready.output_tokens
            self._events(RowEnded(ready.line, ready.custom_id, ready.error))

    def _abandon(self, error: BaseException) -> None:
        """The first error that concerns the whole run ends it."""
        if self._fatal is None:
            self._fatal = error
        self._cancel_all()

    async def _sync_regularly(self) -> None:
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            try:
                await asyncio.to_thread(self._journal.sync)
            except BatchError as error:
                self._abandon(error)
                return


def dry_run(encoder: Encoder, limits: ModelLimits, source: Source, options: BatchOptions, events: Events) -> Summary:
    """Validate every row and count its tokens; nothing is generated or written."""
    started = time.monotonic()
    pipeline = Pipeline(source, Preparer(encoder, limits, options.defaults), limit=options.limit)
    ok = prompt_tokens = 0
    for outcome in pipeline:
        if isinstance(outcome, PreparedRow):
            ok += 1
            prompt_tokens += outcome.prompt_tokens
            events(RowEnded(outcome.row.line, outcome.row.custom_id, None))
        else:
            answer = refused(outcome)
            events(RowEnded(answer.line, answer.custom_id, answer.error))
    return Summary(
        ok=ok,
        failed=pipeline.rows - ok,
        skipped=0,
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
        output_tokens=0,
        wall_s=time.monotonic() - started,
        output="",
    )
