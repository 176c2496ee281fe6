"""One `corellm serve`: port, engine, API workers and display brought together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.text import Text

from corellm import background_stderr
from corellm.comms.messages import Progress
from corellm.config import EngineOptions
from corellm.found_model import FoundModel, find, model_name
from corellm.logs import configure_logging
from corellm.openai_server.options import ServerOptions
from corellm.text_engine import TextEngine
from corellm_tui.startup import StartupDisplay

from .exit_codes import ExitCode

T = TypeVar("T")


def run_serve(options: ServerOptions, engine: EngineOptions) -> ExitCode:
    """Serve until told to stop. Raises `CoreLLMError` for what keeps it from serving, or ends it."""
    background_stderr.install()
    configure_logging(engine.log_level, options.log_format)
    engine = replace(engine, model=model_name(engine))
    with contextlib.ExitStack() as closing:
        if options.api_workers > 1:
            # prometheus-client looks for this when it is imported, and adds up the files that all workers write there.
            folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="corellm-metrics-"))
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        from corellm.openai_server.service import Stopped

        options, bound = _bind(options)
        closing.enter_context(contextlib.closing(bound))
        stopped = asyncio.run(_serve(options, engine, bound))
    return ExitCode.INTERRUPTED if stopped is Stopped.INTERRUPTED else ExitCode.OK


def _bind(options: ServerOptions) -> tuple[ServerOptions, socket.socket]:
    """The options with the real port, and its socket. An API worker's port may be bound twice, but not by strangers."""
    from corellm.openai_server.server import bind

    alone = bind(options)
    options = replace(options, port=alone.getsockname()[1])
    if options.api_workers == 1:
        return options, alone
    alone.close()
    return options, bind(options, shared=True)


async def _serve(options: ServerOptions, engine: EngineOptions, bound: socket.socket) -> object:
    from corellm.openai_server.api_workers import ApiWorkers, WorkerLaunch
    from corellm.openai_server.engine_work import until_no_work
    from corellm.openai_server.service import Service

    console = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    with contextlib.ExitStack() as showing:
        startup = showing.enter_context(StartupDisplay(console))
        service = Service(options, startup.report, say)
        workers = ApiWorkers(WorkerLaunch(options, engine.log_level), service.fail)

        def on_ready(ready: TextEngine) -> None:
            showing.close()
            startup.ready(ready.info)
            say(f"serving on {_address(options)}")
            workers.start(ready.folder)

        async def drain(engine: TextEngine) -> None:
            """What uses our engine beside this process: API workers, and front ends that have joined."""
            await asyncio.gather(workers.drain(), until_no_work(engine))

        async def open_engine(report: Callable[[Progress], None]) -> TextEngine:
            model = await _in_daemon_thread(lambda: find(engine, report))
            return await TextEngine.start(_shared(model), report)

        try:
            return await service.run(bound, open_engine, on_ready, drain)
        finally:
            await workers.close()


def _shared(model: FoundModel) -> FoundModel:
    """The model, launched so that other front ends find the engine."""
    return replace(model, launch=msgspec.structs.replace(model.launch, shared=True))


def _address(options: ServerOptions) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{options.scheme}://{host}:{options.port}"


def _in_daemon_thread(work: Callable[[], T]) -> Awaitable[T]:
    """The result of `work`. A download that is given up must not keep the process alive, as an executor's would."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(set_result: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if result.done() else set_result())

    def run() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
            failure = error
            settle(lambda: result.set_exception(failure))
        else:
            settle(lambda: result.set_result(value))

    threading.Thread(target=run, name="corellm-find-model", daemon=True).start()
    return result
