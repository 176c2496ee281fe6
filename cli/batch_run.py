"""One batch run: model, output, engine and display brought together, and what signals do to it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from corellm.batch.fingerprint import Fingerprint
from corellm.batch.journal import STDOUT, Journal, open_journal
from corellm.batch.lines import Source
from corellm.batch.progress import Summary
from corellm.batch.runner import BatchOptions, BatchRunner, dry_run
from corellm.comms.messages import Progress
from corellm.config import DEMO_MODEL, EngineOptions
from corellm.engine.text_engine import TextEngine, model_name
from corellm.errors import EngineDeadError
from corellm_tui.batch_progress import BatchDisplay, EventLines, summary_json, summary_lines
from corellm_tui.startup import StartupDisplay

from .exit_codes import ExitCode
from .logs import configure_logging
from .model_at_hand import ModelAtHand, find

Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCommand:
    """The options of `corellm batch`, checked. `defaults` are sampling fields for rows that do not say."""

    input: str
    output: str
    order: str
    restart: bool
    retry_errors: bool
    strict: bool
    limit: int | None
    dry_run: bool
    quiet: bool
    json_summary: bool
    defaults: Mapping[str, Any]
    engine: EngineOptions

    def batch_options(self) -> BatchOptions:
        return BatchOptions(order=self.order, limit=self.limit, strict=self.strict, defaults=self.defaults)


def run_batch(command: BatchCommand) -> ExitCode:
    """Run to the end, or to an interruption. Raises `CoreLLMError` for what ends the whole run."""
    configure_logging(command.engine.log_level)
    console = Console(stderr=True, highlight=False, quiet=command.quiet)
    if command.engine.model is None:
        command = replace(command, engine=replace(command.engine, model=model_name(command.engine)))
        if command.engine.model == DEMO_MODEL:
            console.print("no --model given and no GPU here: using the demo model, SmolLM2-135M-Instruct")
    source = Source(command.input)
    try:
        if command.dry_run:
            return _dry_run(command, source, console)
        return asyncio.run(_Run(command, source, console).to_the_end())
    finally:
        source.close()


def _dry_run(command: BatchCommand, source: Source, console: Console) -> ExitCode:
    with StartupDisplay(console) as startup:
        model = find(command.engine, startup.report)
    summary = dry_run(model, model.limits, source, command.batch_options(), EventLines(console).on_event)
    _close(command, console, summary)
    return ExitCode.ROW_ERRORS if summary.failed else ExitCode.OK


class _Run:
    """A run with an engine."""

    def __init__(self, command: BatchCommand, source: Source, console: Console) -> None:
        self._command, self._source, self._console = command, source, console
        self._options = command.batch_options()

    async def to_the_end(self) -> ExitCode:
        async with contextlib.AsyncExitStack() as closing:
            # The output is opened before the engine starts: a refusal should not wait for weights.
            with StartupDisplay(self._console) as startup:
                model = await asyncio.to_thread(find, self._command.engine, startup.report)
                journal, total = await asyncio.to_thread(self._open_output, model)
                closing.enter_context(journal)
                engine = await TextEngine.start(self._command.engine, startup.report)
                closing.push_async_callback(engine.close)
            startup.ready(engine.info)
            summary = await self._generate(engine, journal, total)
        _close(self._command, self._console, summary)
        if summary.interrupted:
            return ExitCode.INTERRUPTED
        return ExitCode.ROW_ERRORS if summary.failed or journal.finished.failed else ExitCode.OK

    def _open_output(self, model: ModelAtHand) -> tuple[Journal, int | None]:
        """The journal, and how many rows the input has if that can be known."""
        command = self._command
        survey = self._source.survey()
        fingerprint = Fingerprint.of(
            survey, model=model.settings.model, dtype=model.settings.dtype, settings=self._options.settings()
        )
        journal = open_journal(
            command.output,
            fingerprint,
            source=command.input,
            restart=command.restart,
            retry_errors=command.retry_errors,
        )
        return journal, survey.rows if survey else None

    async def _generate(self, engine: TextEngine, journal: Journal, total: int | None) -> Summary:
        events = EventLines(self._console).on_event
        runner = BatchRunner(engine, self._source, journal, self._options, events, total=total)
        display = BatchDisplay(self._console, runner.snapshot, engine.latest_stats)
        with _stopping_on_signals(runner), display:
            painting = asyncio.create_task(display.keep_painting())
            try:
                return await runner.run()
            except EngineDeadError:
                self._console.print("finished rows are safe: run the same command again to go on")
                raise
            finally:
                painting.cancel()


@contextlib.contextmanager
def _stopping_on_signals(runner: BatchRunner) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops admission, the second stops now."""
    loop = asyncio.get_running_loop()
    received = 0

    def on_signal() -> None:
        nonlocal received
        received += 1
        if received == 1:
            runner.request_stop()
        else:
            runner.stop_now()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _close(command: BatchCommand, console: Console, summary: Summary) -> None:
    if command.json_summary:
        print(summary_json(summary), file=sys.stderr if command.output == STDOUT else sys.stdout)
        return
    for line in summary_lines(summary, dry_run=command.dry_run):
        console.print(line, markup=False, soft_wrap=True)
