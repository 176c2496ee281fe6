"""The engine's process: starts workers, serves front ends, and tells all of them when it ends."""

from __future__ import annotations

import contextlib
import logging
import traceback

from corellm.comms.messages import Dying, StartupFailed
from corellm.comms.run_folder import RunFolder
from corellm.comms.settings import Launch, read_launch
from corellm.engine.engine import Engine
from corellm.engine.front_ends import FrontEnds
from corellm.engine.startup import Startup
from corellm.engine.stats import StatsPublisher
from corellm.errors import STOPPED, CoreLLMError, EngineDeadError

log = logging.getLogger("corellm.engine")


def run(folder: RunFolder, death_pipe: int) -> int:
    """Serve until told to stop, or until whoever holds the other end of `death_pipe` is gone; the exit code."""
    launch = read_launch(folder)
    logging.basicConfig(level=launch.options.log_level.upper(), format="%(levelname)s engine: %(message)s")
    try:
        folder.lock()
        front_ends = FrontEnds(folder)
    except CoreLLMError as error:
        folder.write_last_words(error.code, error.message)
        return 1
    with contextlib.closing(front_ends):
        return _serve(folder, launch, front_ends, death_pipe)


def _serve(folder: RunFolder, launch: Launch, front_ends: FrontEnds, death_pipe: int) -> int:
    farewell: Dying | StartupFailed = Dying(code=EngineDeadError.code, message=STOPPED)
    failure: type[Dying | StartupFailed] = StartupFailed
    startup = None
    try:
        startup = Startup(folder, launch, front_ends, death_pipe)
        started = startup.run()
        failure = Dying
        stats = StatsPublisher(folder, started.info.model)
        with contextlib.closing(stats):
            Engine(
                started.info, front_ends, startup.workers, started.scheduler, stats, started.constraints, death_pipe
            ).serve()
    except CoreLLMError as error:
        log.info("%s", error.message)
        farewell = failure(code=error.code, message=error.message)
        return 1
    except Exception as error:  # noqa: BLE001  the front ends must learn of any end, whatever it was
        log.debug("%s", traceback.format_exc())
        farewell = failure(code=CoreLLMError.code, message=f"the engine failed: {type(error).__name__}: {error}")
        return 1
    else:
        return 0
    finally:
        folder.write_last_words(farewell.code, farewell.message)
        front_ends.broadcast(farewell)
        if startup is not None:
            startup.workers.stop()
