"""The life of an `EngineNode`'s engine, from its start to its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from corellm.errors import CoreLLMError, EngineDeadError

if TYPE_CHECKING:
    from corellm.comms.messages import Progress
    from corellm.found_model import FoundModel
    from corellm.text_engine import TextEngine

T = TypeVar("T")


class Life:
    """One engine from start to end, on an event loop in a thread of its own. `engine` resolves when it is ready."""

    def __init__(self, model: FoundModel, report: Callable[[Progress], None]) -> None:
        self.engine: Future[TextEngine] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(model, report), name="corellm-engine-node", daemon=True)
        self._thread.start()

    @property
    def death(self) -> CoreLLMError | None:
        """What the engine died of once it was ready; None while it starts or runs."""
        started = self.engine.done() and self.engine.exception() is None
        return self.engine.result().death if started else None

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self) -> None:
        """Stop the engine and wait until it is gone, also while it still starts."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self, model: FoundModel, report: Callable[[Progress], None]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live(model, report))

    async def _live(self, model: FoundModel, report: Callable[[Progress], None]) -> None:
        from corellm.text_engine import TextEngine

        stopping = asyncio.create_task(self._stop.wait())
        starting = asyncio.create_task(TextEngine.start(model, report))
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
        try:
            engine = await starting
        except BaseException as error:  # noqa: BLE001  whoever waits for the engine gets it
            cancelled = isinstance(error, asyncio.CancelledError)
            self.engine.set_exception(EngineDeadError("the engine was closed while it started") if cancelled else error)
            await stopping
            return
        self.engine.set_result(engine)
        await stopping
        await engine.close()  # whoever waits for a request learns that it is over
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls, timeout=1.0)
