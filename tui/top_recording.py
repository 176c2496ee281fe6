"""A recorded stream of stats: gzip of JSON lines, the first of which says what was recorded.

    {"corellm_stats": 1, "engine": {…}}
    [0.25, {"type": "Snapshot", …}]      seconds since the recording began, and a message

A recording that was cut off, by a kill or a full disk, plays up to the cut.
"""

from __future__ import annotations

import contextlib
import gzip
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from corellm.comms.messages import EngineInfo
from corellm.comms.stats_messages import WATCH_VERSION, Snapshot, Tree
from corellm.errors import RecordingError

from .top_hardware import Hardware

Event = Snapshot | Tree | Hardware

HINDSIGHT_S = 90.0  # how much of the past a reader wants when it jumps: more than any history on the screen
_CHUNK = 1 << 16
_LINE_MAX = 16 << 20
_DAMAGE = (msgspec.DecodeError, RecursionError)  # the latter of brackets without end


class _Header(msgspec.Struct):
    corellm_stats: int
    engine: EngineInfo | None = None


class _Version(msgspec.Struct):
    corellm_stats: int


class Recorder:
    """Writes a recording into a new file. Whatever was told to it is in the file a second later at most."""

    def __init__(self, path: Path, engine: EngineInfo | None) -> None:
        try:
            self._file = gzip.open(path, "xb", compresslevel=6)  # noqa: SIM115  closed by `close`
        except FileExistsError:
            raise RecordingError(f"{path} exists; --record writes a new file, choose another name") from None
        except OSError as error:
            raise RecordingError(f"cannot write the recording {path}: {error.strerror}; choose another file") from None
        self._path = path
        self._flushed_s = self._began_s = -1.0
        # Recordings are made to be handed on: where the model lies is nobody else's affair.
        self._write(_Header(WATCH_VERSION, engine and msgspec.structs.replace(engine, model_path="")))

    def add(self, now: float, event: Event) -> None:
        """Append an event that came at `now`, a reading of any steady clock. Raises `RecordingError`."""
        if self._began_s < 0:
            self._flushed_s = self._began_s = now
        self._write((round(now - self._began_s, 3), event))
        if now - self._flushed_s >= 1.0:
            self._flushed_s = now
            self._guard(self._file.flush)

    def close(self) -> None:
        self._guard(self._file.close)

    def _write(self, value: Any) -> None:
        line = msgspec.json.encode(value) + b"\n"
        self._guard(lambda: self._file.write(line))

    def _guard(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            raise RecordingError(f"the recording {self._path} stopped: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded. `times` are seconds and never fall; the events lie in a temporary file, one after another,
    since those of an hour may not fit the memory."""

    engine: EngineInfo | None
    times: list[float]
    _offsets: list[int]  # one more than there are events
    _file: IO[bytes]

    @property
    def duration_s(self) -> float:
        return self.times[-1] if self.times else 0.0

    def close(self) -> None:
        self._file.close()

    def between(self, after_s: float, until_s: float) -> Iterator[Event]:
        """The events with after_s < time <= until_s. Raises `RecordingError` at a damaged one."""
        for index in range(bisect_right(self.times, after_s), bisect_right(self.times, until_s)):
            start, end = self._offsets[index : index + 2]
            self._file.seek(start)
            try:
                yield _events.decode(self._file.read(end - start))
            except _DAMAGE as error:
                raise RecordingError(f"event {index + 1} of the recording is damaged: {error}") from None


_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_timed: msgspec.json.Decoder[tuple[float, msgspec.Raw]] = msgspec.json.Decoder(tuple[float, msgspec.Raw])


def read_recording(path: Path) -> Recording:
    """Read a recording; close it in the end. Raises `RecordingError` when it is none, or of another version."""
    with contextlib.ExitStack() as undo:
        spool = undo.enter_context(tempfile.TemporaryFile())
        recording = _spooled(path, spool)
        undo.pop_all()  # it is the recording's to close now
        return recording


def _spooled(path: Path, spool: IO[bytes]) -> Recording:
    lines = _lines(path)
    times: list[float] = []
    offsets = [0]
    try:
        header = _read_header(next(lines, b""), path)
        for line in lines:
            time_s, event = _timed.decode(line)
            times.append(max(time_s, times[-1] if times else 0.0))
            offsets.append(offsets[-1] + spool.write(event))
    except _DAMAGE as error:
        raise RecordingError(f"{path} is no recording of `corellm top`: {error}") from None
    if not times:
        raise RecordingError(f"the recording {path} holds no event; record for longer than a second")
    return Recording(header.engine, times, offsets, spool)


def _read_header(line: bytes, path: Path) -> _Header:
    version = msgspec.json.decode(line, type=_Version).corellm_stats
    if version != WATCH_VERSION:
        raise RecordingError(
            f"{path} was recorded in version {version} of the stats protocol; this program plays {WATCH_VERSION}"
        )
    return msgspec.json.decode(line, type=_Header)


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a gzip file, which may be cut off anywhere."""
    unzip = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    held = b""
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                while chunk:
                    *whole, held = (held + unzip.decompress(chunk, _CHUNK)).split(b"\n")
                    yield from whole
                    if len(held) > _LINE_MAX:
                        raise RecordingError(f"{path} has a line of more than {_LINE_MAX} bytes")
                    chunk = unzip.unconsumed_tail
    except OSError as error:
        raise RecordingError(f"cannot read the recording {path}: {error.strerror}") from None
    except zlib.error as error:
        raise RecordingError(f"{path} is no recording of `corellm top`: {error}") from None
