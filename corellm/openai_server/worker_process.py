"""An API worker's process: HTTP on the server's port beside others, over an engine that the main process started."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from corellm import background_stderr
from corellm.comms.messages import Progress
from corellm.comms.run_folder import RunFolder
from corellm.comms.settings import Launch, read_launch
from corellm.errors import CoreLLMError, EngineDeadError
from corellm.found_model import load
from corellm.logs import configure_logging
from corellm.openai_server.api_workers import WorkerLaunch, receive_launch
from corellm.openai_server.server import bind
from corellm.openai_server.service import Service, Stopped
from corellm.text_engine import TextEngine

log = logging.getLogger("corellm.server")


def run(folder: RunFolder, death_pipe: int) -> int:
    """Serve until the engine, the main process or a signal ends it; the exit code."""
    launch = receive_launch()
    background_stderr.install()
    configure_logging(launch.log_level, launch.options.log_format)
    try:
        asyncio.run(_serve(launch, folder, death_pipe))
    except CoreLLMError as error:
        log.error("API worker: %s", error.message)
        return 1
    return 0


async def _serve(launch: WorkerLaunch, folder: RunFolder, death_pipe: int) -> None:
    loop = asyncio.get_running_loop()
    service = Service(launch.options, signals={})

    def drain() -> None:
        """Once: a service manager tells every process, and then the main process tells us too."""
        if not service.is_stopping:
            service.stop(Stopped.TERMINATED)

    def stop_now() -> None:
        loop.remove_reader(death_pipe)
        service.fail(EngineDeadError("the server's main process has ended"))
        service.stop(Stopped.TERMINATED)

    # Ctrl-C reaches every process of a terminal, and is the main process's to act on.
    loop.add_signal_handler(signal.SIGTERM, drain)
    loop.add_reader(death_pipe, stop_now)
    bound = bind(launch.options, shared=True)
    # The engine comes before listening: a listener that is not ready would take connections from those that are.
    engine = await TextEngine.attach(folder, load(_engine_launch(folder)), lambda _: None)

    async def joined(report: Callable[[Progress], None]) -> TextEngine:
        return engine

    await service.run(bound, joined)


def _engine_launch(folder: RunFolder) -> Launch:
    """Raises `EngineDeadError` when the engine has ended while we started, and its folder with it."""
    try:
        return read_launch(folder)
    except FileNotFoundError:
        raise EngineDeadError("the engine has ended") from None
