"""What watching costs: the engine, at 1,000 decoding requests; the dashboard, at 10 snapshots a second of as many.

    python -m benchmarks.top_cost [--rows 1000] [--steps 1000] [--blocks 20000] [--seconds 8]

The engine's share is measured inside its loop, over a fake executor that answers at once: a real step is longer, so
that the share of it is smaller. The dashboard runs as a user has it, in a pseudo-terminal of 120 by 40.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import random
import re
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psutil
import zmq

from benchmarks.engine_step import busy_engine
from benchmarks.report import record
from corellm.comms import run_folder, sockets
from corellm.comms.run_folder import RunFolder
from corellm.comms.settings import Launch, write_launch
from corellm.comms.stats_messages import SNAPSHOTS, BlockMap, Snapshot, frame
from corellm.config import EngineOptions
from corellm.engine.stats import StatsPublisher
from corellm_tui.top_table import COLUMNS as COLUMNS_OF_TABLE
from tests.support.top_material import INFO, request, snapshot

COLUMNS, LINES = 120, 40
SHEETS = [(b"?", b"Keys"), (b"e", b"The queue")]
SNAPSHOTS_A_SECOND = 10


def engine_cost(rows: int, steps: int) -> dict[str, float]:
    """Microseconds of CPU a step that the loop spends on stats, without and with a watcher; their share of the turn."""
    figures: dict[str, float] = {}
    for name in ("unwatched", "watched"):
        with busy_engine(rows, 3 * steps, "radix") as busy, contextlib.ExitStack() as closing:
            if name == "watched":
                closing.enter_context(_draining(busy.folder))
                until = time.monotonic() + 0.6
                while time.monotonic() < until:
                    busy.turn()  # until the subscription has come up
            spent = closing.enter_context(_timed(StatsPublisher, "publish", "on_plan", "on_result"))
            turns = [busy.turn(time.thread_time) for _ in range(steps)]
            figures[f"{name}_us_a_step"] = spent[0] / steps * 1e6
            figures[f"{name}_share_of_python"] = spent[0] / sum(turns)
            figures[f"{name}_turn_us"] = statistics.median(turns) * 1e6
    added = figures["watched_us_a_step"] - figures["unwatched_us_a_step"]
    figures["share_of_a_10_ms_step"] = added / 10_000
    return figures


@contextlib.contextmanager
def _draining(folder: RunFolder) -> Iterator[None]:
    """A watcher that reads and throws away."""
    done = threading.Event()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, SNAPSHOTS)
    socket.connect(folder.watch)

    def drain() -> None:
        while not done.is_set():
            if socket.poll(50):
                socket.recv()
        socket.close(linger=0)

    thread = threading.Thread(target=drain)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _timed(cls: type, *names: str) -> Iterator[list[float]]:
    """The seconds spent in these methods, as the one element of a list."""
    spent = [0.0]

    def timed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return real(*arguments)
            finally:
                spent[0] += time.thread_time() - began

        return call

    originals = {name: getattr(cls, name) for name in names}
    for name, real in originals.items():
        setattr(cls, name, timed(real))
    try:
        yield spent
    finally:
        for name, real in originals.items():
            setattr(cls, name, real)


def dashboard_cost(rows: int, blocks: int, seconds: float) -> dict[str, float]:
    """CPU use of `corellm top` and how soon it answers a key, while an engine with `rows` requests publishes."""
    with (
        tempfile.TemporaryDirectory(prefix="top") as root,
        _environment(XDG_RUNTIME_DIR=root),
        _publishing(rows, blocks),
    ):
        terminal = _Terminal()
        try:
            terminal.wait_for(f"{rows:,}".encode(), 20)
            process = psutil.Process(terminal.process.pid)
            process.cpu_percent()
            terminal.read_for(seconds)
            percent = process.cpu_percent()
            names = [column.name for column in COLUMNS_OF_TABLE[2:]]
            sorts = [terminal.answer_ms(b"s", f"by {name}".encode()) for name in names]
            sheets = [terminal.answer_ms(key, shown, b"\x1b") for key, shown in SHEETS * 5]
            memory = process.memory_info().rss
        finally:
            terminal.close()
    return {
        "cpu_percent": percent,
        "sort_median_ms": statistics.median(sorts),
        "sort_worst_ms": max(sorts),
        "sheet_median_ms": statistics.median(sheets),
        "sheet_worst_ms": max(sheets),
        "memory_bytes": memory,
    }


class _Terminal:
    """`corellm top` in a pseudo-terminal."""

    def __init__(self) -> None:
        self._end, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        code = "from corellm_cli.main import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "top"], stdin=other, stdout=other, stderr=other,
            env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}, start_new_session=True,
        )  # fmt: skip
        os.close(other)

    def read_for(self, seconds: float) -> bytes:
        until = time.monotonic() + seconds
        said = b""
        while (left := until - time.monotonic()) > 0:
            if select.select([self._end], [], [], left)[0]:
                said += self._read()
        return said

    def _read(self) -> bytes:
        try:
            return os.read(self._end, 1 << 16)
        except OSError:  # how a terminal says that nobody has it open any more
            raise EOFError("the dashboard has ended") from None

    def wait_for(self, shown: bytes, seconds: float) -> None:
        """Read until this text is drawn. Raises `TimeoutError`."""
        said = b""
        until = time.monotonic() + seconds
        while shown not in re.sub(rb"\x1b\[[\d;]*m", b"", said):
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._end], [], [], left)[0]:
                raise TimeoutError(f"the dashboard has not drawn {shown!r} within {seconds} s")
            said += self._read()

    def answer_ms(self, key: bytes, shown: bytes, undo: bytes = b"") -> float:
        """From a key to the bytes that it leads to."""
        self.read_for(random.random() * 0.2)  # anywhere between two snapshots
        began = time.perf_counter()
        os.write(self._end, key)
        self.wait_for(shown, 5)
        waited = (time.perf_counter() - began) * 1000
        os.write(self._end, undo)
        self.read_for(0.4)
        return waited

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


@contextlib.contextmanager
def _publishing(rows: int, blocks: int) -> Iterator[None]:
    """An engine's folder, and a thread that publishes as its loop would, ten times a second."""
    folder = run_folder.create()
    lock = folder.lock()
    write_launch(folder, Launch(EngineOptions(), "/nowhere"))
    folder.registration.write_bytes(msgspec.json.encode(INFO))
    done = threading.Event()

    def publish() -> None:
        socket = sockets.watch_publisher(zmq.Context.instance(), folder.watch)
        number = 0
        while not done.wait(1 / SNAPSHOTS_A_SECOND):
            number += 1
            socket.send(frame(SNAPSHOTS, _busy_snapshot(number, rows, blocks)), zmq.DONTWAIT)
        socket.close(linger=0)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        os.close(lock)


def _busy_snapshot(number: int, rows: int, blocks: int) -> Snapshot:
    """Every request has moved on, and a tenth of the map is in other hands; the map is as torn as memory gets."""
    chance = random.Random(number % 50)
    runs: list[int] = []
    left = blocks
    while left:
        length = min(left, chance.randint(1, 12))
        runs += [chance.randrange(4), length]
        left -= length
    requests = [request(row, output_tokens=number + row % 7, computed_tokens=number + 40) for row in range(1, rows + 1)]
    made = snapshot(number, requests=requests, blocks=BlockMap(1, runs), steps=snapshot(number).steps * 10)
    return msgspec.structs.replace(made, stats=msgspec.structs.replace(made.stats, running=rows))


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    engine = engine_cost(given.rows, given.steps)
    for name in ("unwatched", "watched"):
        print(
            f"engine, {given.rows} requests, {name}: {engine[f'{name}_us_a_step']:.1f} us of a turn of "
            f"{engine[f'{name}_turn_us']:.0f} us ({engine[f'{name}_share_of_python']:.2%} of the loop's own Python)"
        )
    print(f"engine: watching adds {engine['share_of_a_10_ms_step']:.2%} to a step of 10 ms")
    dashboard = dashboard_cost(given.rows, given.blocks, given.seconds)
    print(
        f"dashboard, {given.blocks} blocks, {SNAPSHOTS_A_SECOND} snapshots a second: "
        f"{dashboard['cpu_percent']:.0f} % of a core, {dashboard['memory_bytes'] / 1e6:.0f} MB"
    )
    print(
        f"dashboard, key to screen: sorting median {dashboard['sort_median_ms']:.0f} ms, worst "
        f"{dashboard['sort_worst_ms']:.0f} ms; opening a sheet median {dashboard['sheet_median_ms']:.0f} ms, worst "
        f"{dashboard['sheet_worst_ms']:.0f} ms"
    )
    record("top_cost", {**vars(given), "engine": engine, "dashboard": dashboard})


if __name__ == "__main__":
    main()
