"""Lines of a batch's input, streamed from a file, a gzip file or standard input in bounded memory."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, BinaryIO, cast

from corellm.comms.messages import Progress
from corellm.errors import BatchError

Report = Callable[[Progress], None]


def _ignore(progress: Progress) -> None:
    """For a caller that does not watch."""


STDIN = "-"
MAX_LINE_BYTES = 64 << 20
STAGE = "check files"  # of a start: the input, then the output
_CHUNK = 1 << 20
_COUNT_STEP = 1 << 14  # rows between two reports
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank, without its line end.

    `number` counts from 1, blank lines included. `data` is None where the line is longer than `limit` bytes.
    """

    number: int
    data: bytes | None
    crc: int
    size: int  # bytes
    limit: int = MAX_LINE_BYTES


@dataclass(frozen=True, slots=True)
class Survey:
    """What a whole input is: the SHA-256 and size of the file as it lies on disk, and how many rows it holds."""

    sha256: str
    size: int  # bytes
    rows: int


class Source:
    """An input: a path, or `-` for standard input. Pipes can be read once only (see `spool`).

    Raises `BatchError` where the input cannot be read.
    """

    def __init__(self, name: str, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.name = name
        self._max_line_bytes = max_line_bytes
        self._spool: IO[bytes] | None = None
        self.is_stream = not stat.S_ISREG(_mode(name))

    def lines(self) -> Iterator[Line]:
        """Every line that is not blank. Splits at newlines alone; a byte order mark at the start is dropped."""
        try:
            with self._opened() as raw:
                yield from read_lines(_unzipped(raw), self._max_line_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BatchError(f"the gzip input {self.name} is damaged: {error}; compress it anew") from None
        except OSError as error:
            raise _unreadable(self.name, error) from None

    def survey(self, report: Report = _ignore) -> Survey | None:
        """Reads a file from end to end, twice; None for a stream."""
        if self.is_stream:
            return None
        digest, read = hashlib.sha256(), 0
        try:
            with open(self.name, "rb") as raw:
                size = os.fstat(raw.fileno()).st_size
                while chunk := raw.read(_CHUNK):
                    digest.update(chunk)
                    read += len(chunk)
                    report(Progress(stage=STAGE, detail="read", done=read, total=size, unit="B"))
        except OSError as error:
            raise _unreadable(self.name, error) from None
        return Survey(digest.hexdigest(), read, self._count(report))

    def _count(self, report: Report) -> int:
        rows = 0
        for rows, _ in enumerate(self.lines(), 1):
            if rows % _COUNT_STEP == 0:
                report(Progress(stage=STAGE, detail="count", done=rows, unit="rows"))
        report(Progress(stage=STAGE, detail="count", done=rows, unit="rows"))
        return rows

    def spool(self) -> None:
        """Copy a stream to an unnamed temporary file, so that it can be read more than once."""
        if not self.is_stream or self._spool is not None:
            return
        copy = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the source)
        try:
            with self._opened() as raw:
                shutil.copyfileobj(raw, copy, _CHUNK)
        except OSError as error:
            copy.close()
            raise _unreadable(self.name, error) from None
        self._spool = copy

    def close(self) -> None:
        if self._spool is not None:
            self._spool.close()

    @contextmanager
    def _opened(self) -> Iterator[io.BufferedReader]:
        if self._spool is not None:
            self._spool.seek(0)
            with open(self._spool.fileno(), "rb", closefd=False) as raw:
                yield raw
        elif self.name == STDIN:
            # A reader of its own: a daemon thread that waits in sys.stdin's would abort the interpreter at exit.
            with open(sys.stdin.fileno(), "rb", closefd=False) as raw:
                yield raw
        else:
            with open(self.name, "rb") as raw:
                yield raw


def is_pipe(name: str) -> bool:
    """Whether an input is standard input or a named pipe, such as a shell's <(command)."""
    try:
        return name == STDIN or stat.S_ISFIFO(os.stat(name).st_mode)
    except OSError:
        return False


def _mode(name: str) -> int:
    """The `st_mode` of an input; standard input counts as a pipe. Raises `BatchError`."""
    if name == STDIN:
        if sys.stdin is None:
            raise BatchError("the input is standard input, which is closed; give a JSONL file, or send rows into it")
        return stat.S_IFIFO
    try:
        mode = os.stat(name).st_mode
    except FileNotFoundError:
        raise BatchError(f"the input {name} is not there; give a JSONL file, or - for standard input") from None
    except OSError as error:
        raise _unreadable(name, error) from None
    if stat.S_ISDIR(mode):
        raise BatchError(f"the input {name} is a folder; give a JSONL file, or - for standard input")
    return mode


def _unreadable(name: str, error: OSError) -> BatchError:
    return BatchError(f"the input {name} cannot be read: {error.strerror or error}")


def _unzipped(raw: io.BufferedReader) -> BinaryIO:
    """The stream, or what it holds if it starts like a gzip file, whatever its name."""
    if raw.peek(2)[:2] == _GZIP_MAGIC:
        return cast("BinaryIO", gzip.GzipFile(fileobj=raw))
    return raw


def read_lines(stream: BinaryIO, limit: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """The lines of a byte stream that are not blank."""
    number = 0
    while piece := stream.readline(limit + 1):
        number += 1
        overlong = len(piece) > limit and not piece.endswith(b"\n")
        if number == 1:
            piece = piece.removeprefix(_BYTE_ORDER_MARK)
        if overlong:
            yield _overlong(stream, number, piece, limit)
            continue
        data = piece.rstrip(b"\r\n")
        if data.strip():
            yield Line(number, data, zlib.crc32(data), len(data), limit)


def _overlong(stream: BinaryIO, number: int, piece: bytes, limit: int) -> Line:
    """Skip to the end of a line that is longer than the limit."""
    crc = size = 0
    while True:
        data = piece.rstrip(b"\r\n") if piece.endswith(b"\n") else piece
        crc, size = zlib.crc32(data, crc), size + len(data)
        if piece.endswith(b"\n"):
            return Line(number, None, crc, size, limit)
        piece = stream.readline(_CHUNK)
        if not piece:
            return Line(number, None, crc, size, limit)
