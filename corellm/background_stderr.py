"""A stderr that nobody waits for: one thread writes, and what it cannot write is dropped and counted.

A pipe whose reader stalls, or a terminal that is held, blocks whoever writes to it. On a server's event loop that would
be everybody.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import sys
import threading

HELD_BYTES = 1 << 20  # of text that waits to be written; about ten thousand lines of an access log
FLUSH_S = 1.0  # at exit


class BackgroundStderr(io.TextIOBase):
    """Text for `fd`, which is neither closed nor changed. Threads may share it; no call of it raises `OSError`.

    A full disk, or a reader that is gone, costs what was to be written; the next line that can be is preceded by the
    number of those lost. Nothing is dropped between two lines that are both held, so that the number stands where the
    lines would have stood.
    """

    def __init__(self, fd: int, held_bytes: int = HELD_BYTES) -> None:
        self._fd, self._limit = fd, held_bytes
        self._changed = threading.Condition()
        self._part = ""  # a line that has not ended yet
        self._lines: list[bytes] = []
        self._held = 0  # bytes of `_lines` and of what the thread is writing
        self._lost_before = self._lost_after = 0  # lines that would stand before, or after, those of `_lines`
        self._writing = False
        threading.Thread(target=self._work, name="corellm-stderr", daemon=True).start()

    def write(self, text: str) -> int:
        with self._changed:
            *lines, self._part = (self._part + text).split("\n")
            for line in lines:
                self._hold(f"{line}\n")
        return len(text)

    def flush(self) -> None:
        """Hand over a line that has no end yet. What is handed over is written later, and maybe not at all."""
        with self._changed:
            if self._part:
                self._hold(self._part)
                self._part = ""

    def drain(self, seconds: float) -> bool:
        """Wait until all is written or lost, at most so long. Returns whether it is."""
        self.flush()
        with self._changed:
            return self._changed.wait_for(lambda: not (self._writing or self._pending()), seconds)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute where the class has a property
        return "utf-8"

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def _hold(self, line: str) -> None:
        data = line.encode("utf-8", "backslashreplace")
        if self._lost_after or self._held + len(data) > self._limit:
            self._lost_after += 1
        else:
            self._lines.append(data)
            self._held += len(data)
        self._changed.notify_all()

    def _pending(self) -> bool:
        return bool(self._lines or self._lost_after)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(self._pending)
                lines, self._lines, self._writing = self._lines, [], True
                before, self._lost_before = self._lost_before, 0
                after, self._lost_after = self._lost_after, 0
            told = [*_lost(before), *((line, 1) for line in lines), *_lost(after)]
            written = self._write([line for line, _ in told])
            with self._changed:
                self._held -= sum(map(len, lines))
                # What is not written is tried again with the next line, and not before: this would not end.
                self._lost_before += sum(count for _, count in told[written:])

    def _write(self, lines: list[bytes]) -> int:
        """Write as many as can be, and return how many: in pieces that a pipe takes whole, so that the lines of
        processes that share it do not cut into each other."""
        done = 0
        while done < len(lines):
            end, size = done + 1, len(lines[done])
            while end < len(lines) and size + len(lines[end]) <= select.PIPE_BUF:
                size += len(lines[end])
                end += 1
            data = b"".join(lines[done:end])
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                return done
            done = end
        return done


def _lost(lines: int) -> list[tuple[bytes, int]]:
    """The line that stands for so many lost ones, if there are any."""
    return [(b"(%d lines of this log are lost: they could not be written)\n" % lines, lines)] if lines else []


def install() -> None:
    """Let whatever writes to `sys.stderr` from here on wait for nothing; at exit the rest gets `FLUSH_S` seconds."""
    before = sys.__stderr__
    if before is None or sys.stderr is not before:
        return  # there is none, or somebody else, such as a test, looks after it
    before.flush()
    background = BackgroundStderr(before.fileno())
    sys.stderr = background

    def restore() -> None:
        background.drain(FLUSH_S)
        # The interpreter flushes what is there in its last moments, when a thread that holds our lock runs no more.
        sys.stderr = before

    atexit.register(restore)
