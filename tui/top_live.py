"""Follow a running engine: read what it publishes, notice when it dies, join the one that takes its place."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import zmq
import zmq.asyncio

from corellm.comms import sockets
from corellm.comms.stats_messages import SNAPSHOTS, TREES, Snapshot, open_frame
from corellm.errors import ProtocolError
from corellm.running_engines import RunningEngine, running_engines

from .top_hardware import HardwareReader
from .top_recording import Event
from .top_state import Link

LOOK_S = 0.5  # between two looks at whether the engine lives, or another has come
STALE_S = 2.0  # without a snapshot, beyond the interval that the engine announced
HARDWARE_S = 1.0


class LiveFeed:
    """Hands on every message of one engine, and every change of the link to it, until it is cancelled.

    `engine` None waits for the first engine that runs. When the engine ends, one of the same name or the same model is
    joined as soon as there is one.
    """

    def __init__(
        self,
        engine: RunningEngine | None,
        *,
        on_event: Callable[[Event], None],
        on_engine: Callable[[RunningEngine], None],
        on_link: Callable[[Link], None],
        trees: bool = False,
        find: Callable[[], list[RunningEngine]] = running_engines,
    ) -> None:
        self._engine = engine
        self._on_event, self._on_engine, self._on_link = on_event, on_engine, on_link
        self._find = find
        self._trees = trees
        self._socket: zmq.asyncio.Socket | None = None
        self._pid: int | None = None  # of the engine, while it lives
        self._has_followed = False  # `engine`, to its end
        self._interval_s = 0.0
        self._heard_at = 0.0

    def want_trees(self, wanted: bool) -> None:
        """The engine makes trees only while someone reads them."""
        if wanted != self._trees and self._socket is not None:
            self._socket.setsockopt(zmq.SUBSCRIBE if wanted else zmq.UNSUBSCRIBE, TREES)
        self._trees = wanted

    async def run(self) -> None:
        """Follow for ever."""
        hardware = asyncio.create_task(self._read_hardware())
        try:
            while True:
                engine = await self._next_engine()
                self._on_engine(engine)
                await self._follow(engine)
                self._engine, self._has_followed, self._pid = engine, True, None
        finally:
            hardware.cancel()
            await asyncio.gather(hardware, return_exceptions=True)

    async def _next_engine(self) -> RunningEngine:
        last = self._engine
        if last is not None and not self._has_followed:
            return last
        if last is None:
            self._on_link(Link(is_live=False, message="no engine runs; waiting for one"))
        while True:
            found = await asyncio.to_thread(self._find)
            if (engine := _successor(last, found)) is not None:
                return engine
            await asyncio.sleep(LOOK_S)

    async def _follow(self, engine: RunningEngine) -> None:
        """Read one engine until it ends."""
        self._heard_at = time.monotonic()
        self._on_link(Link(is_live=False, message="waiting for the engine's first snapshot"))
        async with self._subscribed(engine) as socket:
            while True:
                if await socket.poll(int(LOOK_S * 1000)):
                    self._take(await socket.recv())
                elif not engine.folder.is_alive():
                    self._on_link(Link(is_live=False, message=f"{how_it_ended(engine)}; waiting for another"))
                    return
                else:
                    self._check_silence()

    @contextlib.asynccontextmanager
    async def _subscribed(self, engine: RunningEngine) -> AsyncIterator[zmq.asyncio.Socket]:
        context = zmq.asyncio.Context()
        topics = (SNAPSHOTS, TREES) if self._trees else (SNAPSHOTS,)
        self._socket = sockets.watcher(context, engine.folder.watch, topics)
        try:
            yield self._socket
        finally:
            self._socket.close(linger=0)
            self._socket = None
            context.term()

    def _take(self, raw: bytes) -> None:
        self._heard_at = time.monotonic()
        try:
            message = open_frame(raw)
        except ProtocolError as error:
            self._on_link(Link(is_live=False, message=error.message))
            return
        if isinstance(message, Snapshot):
            self._pid, self._interval_s = message.pid, message.interval_s
        self._on_link(Link(is_live=True))
        self._on_event(message)

    def _check_silence(self) -> None:
        silence = time.monotonic() - self._heard_at
        if silence > STALE_S + self._interval_s:
            self._on_link(
                Link(is_live=False, message=f"stale {silence:.0f} s: the engine is alive but publishes nothing")
            )

    async def _read_hardware(self) -> None:
        reader = await asyncio.to_thread(HardwareReader)
        while True:
            if self._pid:
                self._on_event(await asyncio.to_thread(reader.read, self._pid))
            await asyncio.sleep(HARDWARE_S)


def _successor(last: RunningEngine | None, found: list[RunningEngine]) -> RunningEngine | None:
    """The engine to join after `last`: any at all if there was none, else its namesake, else one of the same model."""
    if last is None:
        return found[0] if found else None
    others = [engine for engine in found if engine.folder != last.folder]
    namesakes = [engine for engine in others if engine.info.name == last.info.name]
    same_model = [engine for engine in others if engine.launch.model_path == last.launch.model_path]
    return next(iter(namesakes + same_model), None)


def how_it_ended(engine: RunningEngine) -> str:
    """In words: by its own last ones, where it had the time."""
    words = engine.folder.last_words()
    if words is not None:
        return f"engine {engine.info.name} has ended: {words[1]}"
    # Whoever owns an engine removes its folder, however it ended.
    return f"engine {engine.info.name} {'was killed' if engine.folder.path.exists() else 'has ended'}"
