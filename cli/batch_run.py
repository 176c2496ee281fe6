"""One batch run: model, output, engine and display brought together, and what signals do to it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from corellm.batch.check import InputCheck
from corellm.batch.fingerprint import Fingerprint
from corellm.batch.journal import STDOUT, Journal, open_journal
from corellm.batch.lines import STAGE, Source, Survey
from corellm.batch.model_identity import model_identity
from corellm.batch.options import BatchOptions
from corellm.batch.prepare import Pipeline, Preparer
from corellm.batch.progress import Event, Summary
from corellm.batch.runner import BatchRunner
from corellm.comms.messages import Progress
from corellm.config import EngineOptions
from corellm.errors import CoreLLMError
from corellm.found_model import FoundModel
from corellm.logs import configure_logging
from corellm.openai_api.prompts import ModelLimits
from corellm.running_engines import Choice, choose
from corellm.text_engine import TextEngine
from corellm_tui.batch_progress import BatchDisplay, EventLines, summary_json, summary_lines
from corellm_tui.foreign import one_line
from corellm_tui.startup import StartupDisplay

from .exit_codes import ExitCode
from .standard_streams import make_stderr_lossy


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
    attach_to: str | None = None  # the name of a running engine
    new_engine: bool = False

    def batch_options(self) -> BatchOptions:
        return BatchOptions(order=self.order, limit=self.limit, strict=self.strict, defaults=self.defaults)


def run_batch(command: BatchCommand) -> ExitCode:
    """Run to the end, or to an interruption. Raises `CoreLLMError` for what ends the whole run."""
    make_stderr_lossy()
    configure_logging(command.engine.log_level)
    options = command.batch_options()
    console = Console(stderr=True, highlight=False, quiet=command.quiet)
    with contextlib.closing(Source(command.input)) as source:
        run = _Run(command, options, source, console)
        try:
            summary = run.dry() if command.dry_run else run.whole()
        except CoreLLMError as error:
            run.tell_end(error.code)
            raise
        except KeyboardInterrupt:
            run.tell_interrupted()
            raise
    _tell(command, console, summary)
    if summary.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.ROW_ERRORS if summary.failed or summary.skipped_failed else ExitCode.OK


class _Run:
    """One run. What can wait long and needs no event loop comes before it, where Ctrl-C simply ends the process."""

    def __init__(self, command: BatchCommand, options: BatchOptions, source: Source, console: Console) -> None:
        self._command, self._options, self._source, self._console = command, options, source, console
        self._summary_so_far: Callable[[str], Summary] | None = None
        self._has_begun = False  # with the rows

    def dry(self) -> Summary:
        """Check every row and run nothing."""
        with StartupDisplay(self._console) as startup:
            model = self._choose(startup.report).model
            # There is no output, so the screen has every error.
            check = self._input_check(model, EventLines(self._console, every_error=True).on_event)
            self._summary_so_far = check.summary
            check.run(startup.report)
            return check.summary()

    def whole(self) -> Summary:
        """Run every row that the output does not have yet."""
        with contextlib.ExitStack() as closing:
            # The input is checked and the output opened before the engine starts: a refusal should not wait for it.
            with StartupDisplay(self._console) as startup:
                choice = self._choose(startup.report)
                model = choice.model
                startup.report(Progress(stage=STAGE))
                survey = self._source.survey(startup.report)
                if self._options.strict:
                    self._summary_so_far = lambda code: Summary(failed_with=code)
                    self._source.spool()
                    self._input_check(model, lambda event: None).run(startup.report, survey.rows if survey else None)
                startup.report(Progress(stage=STAGE, detail=self._command.output))
                journal = closing.enter_context(self._open_output(model, survey))
                if (finished := self._finished_earlier(model, journal, survey)) is not None:
                    return finished
            return asyncio.run(self._generate(choice, journal, survey.rows if survey else None))

    def tell_end(self, failed_with: str) -> None:
        """Say how far a run came that an error ended."""
        if self._summary_so_far is not None:
            _tell(self._command, self._console, self._summary_so_far(failed_with))

    def tell_interrupted(self) -> None:
        """Say what Ctrl-C ended, where no summary does."""
        if not self._has_begun:
            self._console.print("interrupted before the first row; nothing was generated")

    def _choose(self, report: Callable[[Progress], None]) -> Choice:
        command = self._command
        choice = choose(command.engine, report, name=command.attach_to, new=command.new_engine)
        if choice.running is not None:
            self._console.print(Text(one_line(f"using the running engine {choice.running.info.name}")))
        elif command.engine.model is None:
            self._console.print("no --model given and no GPU here: using the demo model, SmolLM2-135M-Instruct")
        return choice

    def _input_check(self, model: FoundModel, events: Callable[[Event], None]) -> InputCheck:
        return InputCheck(model, _limits(model), self._source, self._options, events)

    def _open_output(self, model: FoundModel, survey: Survey | None) -> Journal:
        command = self._command
        identity = model_identity(model.settings, asked=command.engine)
        fingerprint = Fingerprint.of(survey, model=identity, settings=self._options.settings())
        return open_journal(
            command.output,
            fingerprint,
            source=command.input,
            restart=command.restart,
            retry_errors=command.retry_errors,
        )

    def _finished_earlier(self, model: FoundModel, journal: Journal, survey: Survey | None) -> Summary | None:
        """The end of a run whose rows all have their answer, if that is so: it needs no engine."""
        if survey is None or journal.finished.count < min(survey.rows, self._options.limit or survey.rows):
            return None
        preparer = Preparer(model, _limits(model), self._options.defaults)
        pipeline = Pipeline(self._source, preparer, limit=self._options.limit, finished=journal.finished)
        if next(iter(pipeline), None) is not None:
            return None
        return Summary(skipped=pipeline.skipped, skipped_failed=pipeline.skipped_failed, output=journal.name)

    async def _generate(self, choice: Choice, journal: Journal, total: int | None) -> Summary:
        with StartupDisplay(self._console) as startup:
            if choice.running is None:
                engine = await TextEngine.start(choice.model, startup.report)
            else:
                engine = await TextEngine.attach(choice.running.folder, choice.model, startup.report)
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(engine.close)
            startup.ready(engine.info)
            events = EventLines(self._console).on_event
            runner = BatchRunner(engine, self._source, journal, self._options, events, total=total)
            self._summary_so_far = runner.summary
            self._has_begun = True
            display = BatchDisplay(self._console, runner.snapshot, engine.latest_stats, live=not journal.is_terminal)
            with _stopping_on_signals(runner), display:
                painting = asyncio.create_task(display.keep_painting())
                try:
                    return await runner.run()
                finally:
                    painting.cancel()


def _limits(model: FoundModel) -> ModelLimits:
    return ModelLimits(model.max_request_tokens, model.vocab)


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


def _tell(command: BatchCommand, console: Console, summary: Summary) -> None:
    if command.json_summary:
        print(summary_json(summary), file=sys.stderr if command.output == STDOUT else sys.stdout)
        return
    for line in summary_lines(summary, dry_run=command.dry_run, restart=command.restart):
        console.print(line, markup=False, soft_wrap=True)
