"""Items made in a thread, taken from an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
A = TypeVar("A")


class Feed(Generic[T]):
    """Iterates in a daemon thread, at most `depth` items ahead, so that reading and tokenising never block the loop.

    A daemon, since a read of standard input may wait for ever. What the iterable raises is raised by `__anext__`.
    """

    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: deque[T] = deque()
        self._room = threading.Semaphore(depth)
        self._changed = asyncio.Event()
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._produce, args=(items,), name="batch-feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the thread end at its next item."""
        self._closed = True
        self._room.release()

    def __aiter__(self) -> Feed[T]:
        return self

    async def __anext__(self) -> T:
        while not self._ready:
            if self._ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        self._room.release()
        return self._ready.popleft()

    def _produce(self, items: Iterable[T]) -> None:
        error: BaseException | None = None
        try:
            for item in items:
                self._room.acquire()
                if self._closed:
                    return
                self._call(self._put, item)
        except BaseException as raised:  # noqa: BLE001 (handed to the loop's side)
            error = raised
        finally:
            self._call(self._end, error)

    def _put(self, item: T) -> None:
        self._ready.append(item)
        self._changed.set()

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._ended = True
        self._changed.set()

    def _call(self, function: Callable[[A], None], argument: A) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, argument)
