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
        self._states[line] = _FAILED if failed else _ANSWERED
        self._crcs[line] = crc
        self.count += 1


@dataclass(slots=True)
class Recovered:
    """A scanned output: the finished rows, and how many bytes of it are whole lines."""

    finished: FinishedRows = field(default_factory=FinishedRows)
    size: int = 0  # bytes


class _OutputRow(NamedTuple):
    """A whole line of an output: its bytes, and which input line it answers."""

    raw: bytes
    line: int
    crc: int
    failed: bool


def recover(output: Path) -> Recovered:
    """Scan an output that may end in a torn line.

    Raises `BatchError` where a line before the last one is damaged, or answers a row that another line answers: that
    is not what a crash leaves behind.
    """
    found = Recovered()
    with open(output, "rb") as file:
        for row in _whole_lines(file, output):
            if row.line in found.finished:
                raise BatchError(
                    f"{output} has two rows for line {row.line} of the input; remove one of them, or use --restart"
                )
            found.finished.add(row.line, row.crc, failed=row.failed)
            found.size += len(row.raw)
    return found


def drop_failed_rows(output: Path) -> None:
    """Rewrite an output without its failed rows and its torn last line, atomically."""
    draft = output.with_name(output.name + ".tmp")
    with open(output, "rb") as old, open(draft, "wb") as new:
        for row in _whole_lines(old, output):
            if not row.failed:
                new.write(row.raw)
        new.flush()
        os.fsync(new.fileno())
    os.replace(draft, output)


def _whole_lines(file: BinaryIO, output: Path) -> Iterator[_OutputRow]:
    """The lines of an output up to a damaged last one, which a crash may leave behind."""
    damage = ""
    for number, raw in enumerate(file, 1):
        if damage:
            raise BatchError(f"{output} is damaged at line {damage}; repair that line, or use --restart")
        try:
            yield _parse(raw)
        except (msgspec.DecodeError, ValueError) as error:
            damage = f"{number} ({error})"


def _parse(raw: bytes) -> _OutputRow:
    if not raw.endswith(b"\n"):
        raise ValueError("no line end")
    row = _decoder.decode(raw)
    ident = _ROW_ID.fullmatch(row.id)
    if ident is None:
        raise ValueError("its id is not one of a batch run")
    return _OutputRow(raw, int(ident[1]), int(ident[2], 16), row.failed)


_ROW_ID = re.compile(r"batch_req_(\d{1,12})_([0-9a-f]{8})", re.ASCII)
_decoder = msgspec.json.Decoder(_OutputLine)
