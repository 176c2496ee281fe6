"""`corellm top` without a screen: one picture as text, the stream as JSON lines, or only a recording."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import zmq.asyncio

from corellm.comms import sockets
from corellm.comms.stats_messages import SNAPSHOTS, TREES, Snapshot, WatchMessage, open_frame
from corellm.errors import EngineDeadError, EngineTimeoutError
from corellm.running_engines import RunningEngine

from . import top_panels
from .top_hardware import HardwareReader
from .top_lines import plain
from .top_live import how_it_ended
from .top_recording import Event, Recorder
from .top_state import Link, TopState
from .top_table import View, header_line, row_line, select

LOOK_S = 0.5
SILENCE_S = 10.0
HARDWARE_S = 1.0


async def published(engine: RunningEngine, *topics: bytes) -> AsyncIterator[WatchMessage]:
    """What an engine publishes, for as long as it does.

    Raises `EngineDeadError` when it ends, `EngineTimeoutError` when it falls silent, `ProtocolError` when it speaks
    another version.
    """
    context = zmq.asyncio.Context()
    socket = sockets.watcher(context, engine.folder.watch, topics)
    heard_at = time.monotonic()
    try:
        while True:
            if await socket.poll(int(LOOK_S * 1000)):
                heard_at = time.monotonic()
                yield open_frame(await socket.recv())
            elif not engine.folder.is_alive():
                raise EngineDeadError(how_it_ended(engine))
            elif time.monotonic() - heard_at > SILENCE_S:
                raise EngineTimeoutError(f"engine {engine.info.name} has published nothing for {SILENCE_S:.0f} s")
    finally:
        socket.close(linger=0)
        context.term()


async def picture(engine: RunningEngine) -> TopState:
    """The state after two snapshots: rates need two. Raises what `published` raises."""
    state = TopState(engine.info)
    async for message in published(engine, SNAPSHOTS):
        state.add(message)
        state.set_link(Link(is_live=True))
        if len(state.points) == 2:
            break
    if state.snapshot is not None:
        reader = HardwareReader()
        reader.read(state.snapshot.pid)
        await asyncio.sleep(0.1)  # CPU use is measured between two readings
        state.add(reader.read(state.snapshot.pid))
    return state


def text_lines(state: TopState, columns: int) -> list[str]:
    """Every panel, one below the other, and every request."""
    lines = top_panels.header(state, columns)
    lines += top_panels.kv_cache(state, columns, 10)
    lines += top_panels.rates(state, columns, 14)
    lines += top_panels.steps(state, columns, 7)
    snapshot = state.snapshot
    if snapshot is not None and snapshot.requests:
        now, view = snapshot.stats.uptime_s, View()
        lines.append(header_line(view, columns))
        lines += [row_line(row, now, columns) for row in select(snapshot.requests, view, now)]
    return [plain(line) for line in lines]


def json_line(message: Event) -> bytes:
    """A message as one line of JSON."""
    return msgspec.json.encode(message) + b"\n"


async def stream_json(engine: RunningEngine, write: Callable[[bytes], None]) -> None:
    """Each snapshot as it comes, until the engine ends. Raises what `published` raises."""
    async for message in published(engine, SNAPSHOTS):
        write(json_line(message))


async def record(engine: RunningEngine, recorder: Recorder) -> None:
    """Write everything down until the engine ends. Raises what `published` and the recorder raise."""
    reader = await asyncio.to_thread(HardwareReader)
    read_at = 0.0
    async for message in published(engine, SNAPSHOTS, TREES):
        now = time.monotonic()
        recorder.add(now, message)
        if isinstance(message, Snapshot) and now - read_at >= HARDWARE_S:
            read_at = now
            recorder.add(now, await asyncio.to_thread(reader.read, message.pid))
