"""A program on a pseudo-terminal, and the screen that it draws there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyte

WAIT_S = 60.0
SETTLED_S = 0.4  # without output for this long, a program waits


class _Screen(pyte.HistoryScreen):
    """Answers questions about the cursor, as terminals do."""

    def __init__(self, columns: int, rows: int, reply: Callable[[bytes], object]) -> None:
        super().__init__(columns, rows, history=100_000)
        self._reply = reply

    def write_process_input(self, data: str) -> None:
        self._reply(data.encode())


class Terminal:
    """`output` is every byte that the program wrote."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], columns: int, rows: int) -> None:
        self.output = b""
        self._master, slave = pty.openpty()
        self._screen = _Screen(columns, rows, lambda data: os.write(self._master, data))
        self._stream = pyte.ByteStream(self._screen)
        self._set_size(columns, rows)
        self._before = termios.tcgetattr(slave)
        # A terminal that the leader of a new session opens becomes its own, and makes a signal of Ctrl-C.
        opening = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(slave), *command]
        self.process = subprocess.Popen(opening, env=dict(env), start_new_session=True)
        self._slave = slave  # open, so that reading does not fail before the program has opened it

    def send(self, text: str) -> None:
        """Press keys: `\\r` is Enter, `\\x03` Ctrl-C."""
        data = text.encode()
        while data:
            data = data[os.write(self._master, data[:512]) :]
            self._read(0.01)

    def paste(self, text: str) -> None:
        self.send(f"\x1b[200~{text}\x1b[201~")

    def resize(self, columns: int, rows: int) -> None:
        self._set_size(columns, rows)
        self._screen.resize(rows, columns)
        self.process.send_signal(signal.SIGWINCH)

    def wait_for(self, text: str, timeout_s: float = WAIT_S) -> None:
        """Until `text` is on the screen or above it. Raises `TimeoutError`, with the screen."""
        self.wait_until(lambda: text in self.text(), f"{text!r}", timeout_s)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {timeout_s} s; the terminal has:\n{self.text()}")
            self._read(0.05)

    def settle(self) -> None:
        """Until the program has been silent for a while."""
        deadline = time.monotonic() + WAIT_S
        while self._read(SETTLED_S):
            if time.monotonic() > deadline:
                raise TimeoutError(f"output does not end; the terminal has:\n{self.text()}")

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """The exit code; what the program still writes is read."""
        self.wait_until(lambda: self.process.poll() is not None, "exit", timeout_s)
        while self._read(0.05):
            pass
        return self.process.returncode

    def lines(self) -> list[str]:
        """Every line, those that have scrolled away first, without spaces at their ends."""
        width = self._screen.columns
        scrolled = ["".join(row[column].data for column in range(width)) for row in self._screen.history.top]
        return [line.rstrip() for line in [*scrolled, *self._screen.display]]

    def text(self) -> str:
        return "\n".join(self.lines()).rstrip()

    def words(self) -> str:
        """The text on one line, however it was broken."""
        return " ".join(self.text().split())

    def is_as_before(self) -> bool:
        """Whether the terminal echoes, makes lines and signals, as it did before the program began."""
        return termios.tcgetattr(self._slave) == self._before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self._slave)
        os.close(self._master)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self, wait_s: float) -> bool:
        """Take what there is; False: nothing came within `wait_s`."""
        if not select.select([self._master], [], [], wait_s)[0]:
            return False
        data = os.read(self._master, 65536)
        self.output += data
        self._stream.feed(data)
        return bool(data)


@contextlib.contextmanager
def terminal(
    command: Sequence[str], env: Mapping[str, str], *, columns: int = 80, rows: int = 24
) -> Iterator[Terminal]:
    """A program that is gone, with its terminal, when the block ends."""
    opened = Terminal(command, env, columns, rows)
    try:
        yield opened
    finally:
        opened.close()
