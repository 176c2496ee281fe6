"""One server process from its bound port to its end: start-up, signals, the engine's death, draining."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import Any

from corellm.comms.messages import Progress, Stats
from corellm.errors import STOPPED, CoreLLMError
from corellm.openai_server.engine_work import engine_work
from corellm.openai_server.options import ServerOptions
from corellm.openai_server.server import HttpServer, make_app
from corellm.openai_server.state import ServerState
from corellm.text_engine import TextEngine

COUNT_S = 1.0  # for the engine to say how much it has to do
FAREWELL_S = 1.0  # for the last events of requests that were ended to reach their clients

log = logging.getLogger("corellm.server")

OpenEngine = Callable[[Callable[[Progress], None]], Awaitable[TextEngine]]
Drain = Callable[[TextEngine], Awaitable[None]]


class Stopped(Enum):
    """What a service ended by, when it was not an error."""

    TERMINATED = "SIGTERM"
    INTERRUPTED = "SIGINT"


SIGNALS: Mapping[signal.Signals, Stopped] = {
    signal.SIGTERM: Stopped.TERMINATED,
    signal.SIGINT: Stopped.INTERRUPTED,
}


class Service:
    """Serves on one socket until one of `signals` or the engine's death. `run` may be called once.

    `report` is told how far the start-up is, `say` what a user who waits for the end wants to know, in one line.
    """

    def __init__(
        self,
        options: ServerOptions,
        report: Callable[[Progress], None] = lambda _: None,
        say: Callable[[str], None] | None = None,
        signals: Mapping[signal.Signals, Stopped] = SIGNALS,
    ) -> None:
        self._options, self._report, self._say, self._signals = options, report, say, signals
        self._state = ServerState(-(-options.max_concurrent // options.api_workers))
        self._engine: TextEngine | None = None
        self._stop: asyncio.Future[Stopped] = asyncio.get_running_loop().create_future()
        self._stop_now = asyncio.Event()
        self._http = HttpServer(make_app(self._state, options, self._latest_stats, self._model), options)

    async def run(
        self,
        bound: socket.socket,
        open_engine: OpenEngine,
        on_ready: Callable[[TextEngine], None] = lambda _: None,
        on_drain: Drain | None = None,
    ) -> Stopped:
        """Listen, open the engine, serve, drain.

        `on_ready` is called once requests are welcome; what `on_drain` does is awaited beside our own draining, within
        the same time. Raises what kept the engine from starting, or what it died of.
        """
        loop = asyncio.get_running_loop()
        for number, kind in self._signals.items():
            loop.add_signal_handler(number, self.stop, kind)
        try:
            await self._http.start(bound)
            engine = await self._unless_stopped(open_engine(self._on_progress))
            if engine is None:
                return self._stop.result()
            self._engine = engine
            self._state.serve(engine)
            on_ready(engine)
            await self._serve(engine)
            await self._drain(engine, on_drain)
            return self._stop.result()
        finally:
            try:
                await self._http.close()
            finally:
                if self._engine is not None:
                    await self._engine.close()
            for number in self._signals:
                loop.remove_signal_handler(number)

    @property
    def is_stopping(self) -> bool:
        return self._stop.done()

    def stop(self, kind: Stopped) -> None:
        """The first call drains, the second stops now."""
        if self._stop.done():
            self._stop_now.set()
        else:
            self._stop.set_result(kind)

    def fail(self, error: CoreLLMError) -> None:
        """Something that the server cannot do without is gone."""
        if not self._stop.done():
            self._state.fail(error)
            self._stop.set_exception(error)
            self._stop.exception()  # it is raised where it is awaited; no complaint if that is never

    # ---- inside ---------------------------------------------------------------------------------------------------

    async def _unless_stopped(self, opening: Awaitable[TextEngine]) -> TextEngine | None:
        """The engine, or None when a signal comes first: there is nothing to drain yet."""
        task = asyncio.ensure_future(opening)
        await _first(task, self._stop)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        return None if task.cancelled() else task.result()

    async def _serve(self, engine: TextEngine) -> None:
        """Until a signal. Raises what the engine, or anything else that `fail` was told of, died of."""
        dying = asyncio.create_task(engine.died())
        try:
            await _first(dying, self._stop)
            if dying.done():
                self.fail(dying.result())
            self._stop.result()
        except CoreLLMError:
            engine.abort_all()
            await self._until_idle(FAREWELL_S)
            raise
        finally:
            dying.cancel()

    async def _drain(self, engine: TextEngine, beside: Drain | None) -> None:
        """Until nothing is open any more, the grace has passed, or a second signal comes."""
        self._state.drain()
        quiet = asyncio.gather(self._state.idle(), *([beside(engine)] if beside is not None else []))
        announcing = asyncio.create_task(self._announce(engine))
        dying = asyncio.create_task(engine.died())
        stopping = asyncio.create_task(self._stop_now.wait())
        try:
            await _first(quiet, dying, stopping, seconds=self._options.shutdown_grace)
            # The same signal may have gone to the engine, which then drained too and left in order.
            if dying.done() and not (self._state.is_idle and dying.result().message == STOPPED):
                self._state.fail(dying.result())
                raise dying.result()
        finally:
            for work in (quiet, announcing, dying, stopping):
                work.cancel()
            await asyncio.gather(quiet, announcing, dying, stopping, return_exceptions=True)
            engine.abort_all()
            await self._until_idle(FAREWELL_S)

    async def _announce(self, engine: TextEngine) -> None:
        """Say what the end waits for, unless that is nothing."""
        if self._say is None:
            return
        work = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COUNT_S):
                work = await engine_work(engine)
        if answers := max(work, self._state.open_answers):  # the engine knows all front ends; it may be behind a little
            self._say(
                f"draining: {answers} {'answer is' if answers == 1 else 'answers are'} open, for at most "
                f"{self._options.shutdown_grace:g} s more; Ctrl-C or SIGTERM again to stop now"
            )

    async def _until_idle(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._state.idle()
        except TimeoutError:
            log.warning("%d answers did not reach their clients", self._state.open_answers)

    def _on_progress(self, progress: Progress) -> None:
        self._state.report(progress)
        self._report(progress)

    def _latest_stats(self) -> Stats | None:
        return self._engine.latest_stats() if self._engine is not None else None

    def _model(self) -> str:
        names = self._options.served_model_names
        return names[0] if names else self._engine.info.model if self._engine is not None else ""


async def _first(*waits: asyncio.Future[Any], seconds: float | None = None) -> None:
    """Until one of them is done, or the time has passed."""
    await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
