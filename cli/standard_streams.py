"""stdout and stderr as a command finds them: closed, or on a full disk."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

from corellm.errors import OptionError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STDERR = 2  # the file descriptor


class _Lossy(io.FileIO):
    """Takes everything, and writes what can be written."""

    def write(self, data: ReadableBuffer, /) -> int:
        size = memoryview(data).nbytes
        try:
            return super().write(data) or size  # None: it would have to wait
        except OSError:
            return size


def prepare_streams() -> None:
    """Let narration that cannot be written end nothing, and characters that have no bytes become question marks.

    Raises `OptionError` where stdout, which is what a command is run for, is closed.
    """
    make_stderr_lossy()
    if sys.stdout is None:
        raise OptionError("stdout is closed, so there is nowhere to write to; send it to a file, a pipe or /dev/null")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def make_stderr_lossy() -> None:
    """Let narration that cannot be written end nothing."""
    if sys.stderr is not sys.__stderr__:
        return  # somebody else, such as a test, looks after it
    if sys.stderr is None:  # its number must not go to a file that is opened later, and be written to by a library
        null = os.open(os.devnull, os.O_WRONLY)
        if null != STDERR:
            os.dup2(null, STDERR)
            os.close(null)
    encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
    writer = io.BufferedWriter(_Lossy(STDERR, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(writer, encoding=encoding, errors="replace", line_buffering=True)
