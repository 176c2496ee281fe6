"""What an earlier run left in an output: its finished rows, and where its whole lines end."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from corellm.errors import BatchError

FIRST_LINES = 1 << 10


def row_id(line: int, crc: int) -> str:
    """The `id` of an output line: which input line it answers, and the CRC-32 of that line's bytes."""
    return f"batch_req_{line}_{crc:08x}"


class _Response(msgspec.Struct):
    status_code: int


class _OutputLine(msgspec.Struct):
    """The part of an output line that tells what became of a row."""

    id: str
    response: _Response | None
    error: dict[str, object] | None

    @property
    def failed(self) -> bool:
        return self.error is not None or self.response is None or self.response.status_code >= 400


_OPEN, _ANSWERED, _FAILED = range(3)


class FinishedRows:
    """The input lines that have an output row, with the CRC-32 they had: 5 bytes for each line up to the last one."""

    def __init__(self) -> None:
        self._states: npt.NDArray[np.uint8] = np.zeros(FIRST_LINES, np.uint8)
        self._crcs: npt.NDArray[np.uint32] = np.zeros(FIRST_LINES, np.uint32)
        self.count = 0

    def __contains__(self, line: int) -> bool:
        return line < len(self._states) and self._states[line] != _OPEN

    def crc(self, line: int) -> int:
        """Of a line that is in here."""
        return int(self._crcs[line])

    def failed(self, line: int) -> bool:
        """Whether the output row of a line that is in here is an error."""
        return bool(self._states[line] == _FAILED)

    def add(self, line: int, crc: int, *, failed: bool = False) -> None:
        if line >= len(self._states):
            more = max(line + 1 - len(self._states), len(self._states))
            self._states = np.concatenate([self._states, np.zeros(more, np.uint8)])
            self._crcs = np.concatenate([self._crcs, np.zeros(more, np.uint32)])
        self.count += line not in self
        self._states[line] = _FAILED if failed else _ANSWERED
        self._crcs[line] = crc

    def remove(self, line: int) -> None:
        """Take out a line that is in here."""
        self._states[line] = _OPEN
        self.count -= 1

    def remove_failed(self) -> bool:
        """Take out the lines whose output row is an error; whether there were any."""
        failed = self._states == _FAILED
        self._states[failed] = _OPEN
        self.count -= int(np.count_nonzero(failed))
        return bool(failed.any())


@dataclass(slots=True)
class Recovered:
    """A scanned output: the finished rows, and how many bytes of it are whole lines.

    `replaced` are the lines that have two rows: a failed one, and behind it what came of running it again.
    """

    finished: FinishedRows = field(default_factory=FinishedRows)
    replaced: FinishedRows = field(default_factory=FinishedRows)
    size: int = 0  # bytes


class _OutputRow(NamedTuple):
    """A whole line of an output: its bytes, and which input line it answers."""

    raw: bytes
    line: int
    crc: int
    failed: bool


def recover(output: Path) -> Recovered:
    """Scan an output that may end in a torn line.

    Raises `BatchError` where another line is damaged or is no row, or answers a row that another line answers, unless
    that one failed and is replaced: that is not what a crash leaves behind.
    """
    found = Recovered()
    with open(output, "rb") as file:
        for row in _whole_lines(file, output):
            if row.line in found.finished:
                if not found.finished.failed(row.line) or row.line in found.replaced:
                    raise BatchError(
                        f"{output} has two rows for line {row.line} of the input; remove one of them, or use --restart"
                    )
                found.replaced.add(row.line, row.crc)
            found.finished.add(row.line, row.crc, failed=row.failed)
            found.size += len(row.raw)
    return found


def drop_replaced_rows(output: Path) -> None:
    """Rewrite an output without the failed rows that are replaced and without its torn last line, atomically.

    Raises `BatchError` as `recover` does.
    """
    replaced = recover(output).replaced
    if not replaced.count:
        return
    draft = output.with_name(output.name + ".tmp")
    try:
        with open(output, "rb") as old, open(draft, "wb") as new:
            for row in _whole_lines(old, output):
                if row.line in replaced:
                    replaced.remove(row.line)  # what comes behind it stays
                else:
                    new.write(row.raw)
            new.flush()
            os.fsync(new.fileno())
        os.replace(draft, output)
    except BaseException:
        draft.unlink(missing_ok=True)  # it may be what fills the disk
        raise


def _whole_lines(file: BinaryIO, output: Path) -> Iterator[_OutputRow]:
    """The lines of an output, up to a last one that a crash has torn. Raises `BatchError` for any other damage."""
    damage: BatchError | None = None
    for number, raw in enumerate(file, 1):
        if damage is not None:
            raise damage
        try:
            yield _parse(raw)
        except (msgspec.DecodeError, ValueError) as error:
            damage = BatchError(f"{output} is damaged at line {number} ({error}); repair that line, or use --restart")
            torn = _is_torn(raw)
    if damage is not None and not torn:
        raise damage


def _is_torn(raw: bytes) -> bool:
    """Whether a last line is the beginning of a row, or what a machine's crash leaves: zeros in place of bytes."""
    begins = raw.startswith(_ROW_BEGIN) or _ROW_BEGIN.startswith(raw)
    return b"\0" in raw or (begins and not raw.endswith(b"\n"))


def _parse(raw: bytes) -> _OutputRow:
    if not raw.endswith(b"\n"):
        raise ValueError("no line end")
    row = _decoder.decode(raw)
    ident = _ROW_ID.fullmatch(row.id)
    if ident is None:
        raise ValueError("its id is not one of a batch run")
    return _OutputRow(raw, int(ident[1]), int(ident[2], 16), row.failed)


_ROW_BEGIN = b'{"id":"batch_req_'
_ROW_ID = re.compile(r"batch_req_(\d{1,12})_([0-9a-f]{8})", re.ASCII)
_decoder = msgspec.json.Decoder(_OutputLine)
