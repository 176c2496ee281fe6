"""Writes to a pipe or a terminal, whose reader may not read, without blocking the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue


class StreamWriter:
    """Calls a blocking `write` in a thread of its own.

    A daemon, since a write to a pipe that nobody reads never returns, and must not keep the process alive.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="batch-writer", daemon=True).start()

    async def write(self, data: bytes) -> None:
        """Returns when `data` is written, or raises what the write raised."""
        done = self._loop.create_future()
        self._jobs.put((data, done))
        await done

    def close(self) -> None:
        """Let the thread end after the present write."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            data, done = job
            error: Exception | None = None
            try:
                self._write(data)
            except Exception as raised:  # noqa: BLE001 (handed to the loop's side)
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(_settle, done, error)


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
