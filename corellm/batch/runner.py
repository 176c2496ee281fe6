"""Runs the rows of an input on an engine: admission, order, interruption and the death of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from corellm.batch.answers import Answer, Answerer, refused
from corellm.batch.check import bad_row
from corellm.batch.engine_api import Engine
from corellm.batch.feed import Feed
from corellm.batch.journal import Journal
from corellm.batch.lines import Source
from corellm.batch.options import BatchOptions
from corellm.batch.ordering import OutputOrder
from corellm.batch.prepare import Outcome, Pipeline, PreparedRow, Preparer
from corellm.batch.progress import Event, RowEnded, SharedId, Snapshot, Stopping, Summary
from corellm.batch.rows import RowError
from corellm.batch.stream_writer import StreamWriter
from corellm.errors import BatchError, EngineDeadError
from corellm.openai_api.prompts import ModelLimits

MAX_TOKENS_IN_FLIGHT = 1 << 24  # prompt tokens of admitted rows: 64 MiB
FEED_DEPTH = 64  # rows tokenised ahead of admission
HELD_BACK = 8  # rows held back for input order, as a multiple of those in flight
MAX_UNWRITTEN = 256  # finished rows that wait for a stream's reader: admission then waits too
SYNC_INTERVAL_S = 5.0

Events = Callable[[Event], None]


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
        self._journal, self._options, self._events = journal, options, events
        self._clock = clock
        self._started = clock()
        self._total = total if total is None or options.limit is None else min(total, options.limit)
        preparer = Preparer(engine, ModelLimits.of(engine.info), options.defaults)
        self._pipeline = Pipeline(source, preparer, limit=options.limit, finished=journal.finished)
        self._max_in_flight = options.max_in_flight or 2 * engine.info.max_seqs
        self._answerer = Answerer(engine, engine.tokenizer, engine.info.model, self._max_in_flight)
        self._order = OutputOrder[Answer](by_input=options.order == "input", window=HELD_BACK * self._max_in_flight)
        self._ok = self._failed = 0
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._open: dict[asyncio.Task[None], int] = {}  # running rows: their prompt tokens
        self._unwritten: asyncio.Queue[Answer | None] = asyncio.Queue()  # of a stream; None ends it
        self._room = asyncio.Event()
        self._admission: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
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
        self._admission.add_done_callback(self._part_ended)
        self._writing = asyncio.create_task(self._write_stream())
        self._writing.add_done_callback(self._part_ended)
        syncing = asyncio.create_task(self._sync_regularly())
        if self._stopping:
            self._admission.cancel()
        try:
            await asyncio.wait([self._admission])
            while self._open:
                await asyncio.wait(self._open)
            self._unwritten.put_nowait(None)
            await asyncio.wait([self._writing])
        finally:
            syncing.cancel()
            if self._grace is not None:
                self._grace.cancel()
            self._cancel_all()
            await asyncio.gather(self._admission, self._writing, syncing, *self._open, return_exceptions=True)
        if self._fatal is not None:
            raise self._fatal
        return self.summary()

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
        """Admit no more rows, cancel those in flight, drop those that no reader took. Call it in the event loop."""
        self._stopping = True
        self._cancel_all()

    def _cancel_all(self) -> None:
        self._cancelled = True
        for task in (self._admission, self._writing, *self._open):
            if task is not None:
                task.cancel()

    def snapshot(self) -> Snapshot:
        return Snapshot(
            total=self._total,
            ok=self._ok,
            failed=self._failed,
            skipped=self._pipeline.skipped,
            skipped_failed=self._pipeline.skipped_failed,
            in_flight=len(self._open),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            elapsed_s=self._clock() - self._started,
            stopping=self._stopping,
        )

    def summary(self, failed_with: str | None = None) -> Summary:
        """What the run came to; `failed_with` is the code of the error that ended it."""
        end = self.snapshot()
        # A `BatchError` is of the input or the output, and says itself what must change first.
        unfinished = failed_with not in (None, BatchError.code) or (failed_with is None and self._stopping)
        return Summary(
            ok=end.ok,
            failed=end.failed,
            skipped=end.skipped,
            skipped_failed=end.skipped_failed,
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            output_tokens=end.output_tokens,
            wall_s=end.elapsed_s,
            output=self._journal.name,
            interrupted=self._stopping,
            failed_with=failed_with,
            resumable=unfinished and not self._journal.is_stream,
        )

    async def _admit_all(self) -> None:
        feed = Feed(self._pipeline, FEED_DEPTH)
        try:
            async for outcome in feed:
                await self._wait_for_room()
                self._admit(outcome)
        finally:
            feed.close()

    def _admit(self, outcome: Outcome) -> None:
        if not isinstance(outcome, RowError) and outcome.row.shared:
            self._events(SharedId(outcome.row.line, outcome.row.custom_id))
        if isinstance(outcome, PreparedRow):
            task = asyncio.create_task(self._run_row(self._order.admit(), outcome))
            self._open[task] = outcome.prompt_tokens
            task.add_done_callback(self._row_left)
        elif self._options.strict:
            raise bad_row(outcome)  # the check before the run did not know yet how much the engine's cache holds
        else:
            self._deliver(self._order.admit(), refused(outcome))

    async def _wait_for_room(self) -> None:
        while (
            len(self._open) >= self._max_in_flight
            or self._order.full
            or sum(self._open.values()) >= MAX_TOKENS_IN_FLIGHT
            or self._unwritten.qsize() >= MAX_UNWRITTEN
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
            if self._journal.is_stream:
                self._unwritten.put_nowait(ready)
            else:
                self._journal.append(ready.output)
                self._count(ready)

    async def _write_stream(self) -> None:
        """Write the rows of a stream as its reader takes them."""
        if not self._journal.is_stream:
            return
        writer = StreamWriter(self._journal.append)
        try:
            while (answer := await self._unwritten.get()) is not None:
                await writer.write(answer.output)
                self._count(answer)
                self._room.set()
        finally:
            writer.close()

    def _count(self, written: Answer) -> None:
        if written.error is None:
            self._ok += 1
        else:
            self._failed += 1
        self._prompt_tokens += written.prompt_tokens
        self._cached_tokens += written.cached_tokens
        self._output_tokens += written.output_tokens
        self._events(RowEnded(written.line, written.custom_id, written.error))

    def _part_ended(self, task: asyncio.Task[None]) -> None:
        """Admission or writing is over: an error of theirs ends the run."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._abandon(error)

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
