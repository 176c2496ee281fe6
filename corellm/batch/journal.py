"""The output of a batch run: one line a row, appended as it finishes, so that a killed run can go on.

Beside OUT lie OUT.run.json, the fingerprint of what it was made from, and while a run is on, OUT.lock.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from corellm.batch import fingerprint as fingerprints
from corellm.batch.fingerprint import Fingerprint
from corellm.batch.locking import OutputLock
from corellm.batch.recovery import FinishedRows, Recovered, drop_replaced_rows, recover, row_id
from corellm.errors import BatchError

STDOUT = "-"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Journal:
    """Appends output rows to a descriptor, one `write` a row, nothing held in this process.

    Made by `open_journal`. `finished` are the rows that an earlier run wrote, but for failed ones that are to run
    again. Those stay in the output until `close`, which drops the ones that another row replaces: killed at any time,
    the output has an old or a new row for each.
    With `is_stream` the output is no file: a write may then wait for a reader, and nothing can be resumed.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        finished: FinishedRows,
        *,
        lock: OutputLock | None,
        size: int,
        replaces_in: Path | None = None,
    ) -> None:
        self.name = name
        self.finished = finished
        self.is_stream = lock is None
        self._fd = fd
        self._lock = lock  # None: the output is a stream, or closed
        self._size = size  # bytes of whole rows
        self._replaces_in = replaces_in  # the output, where it has failed rows that run again

    @property
    def is_terminal(self) -> bool:
        return os.isatty(self._fd)

    def append(self, row: bytes) -> None:
        """Write one row and its line end. Blocks while a stream's reader does not read.

        Raises `BatchError` when the row cannot be written; a part of it that got written is taken back.
        """
        data = row + b"\n"
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            self._take_back()
            raise self._cannot_write(error) from None
        self._size += len(data)

    def sync(self) -> None:
        """Have the rows so far on the disk. Blocks."""
        if self._lock is None:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._cannot_write(error) from None

    def close(self) -> None:
        """Sync, drop the rows that others replace, and let another run use the output."""
        try:
            self.sync()
            self._drop_replaced()
        finally:
            if self._lock is not None:
                os.close(self._fd)
                self._lock.release()
                self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drop_replaced(self) -> None:
        if self._replaces_in is None or self._lock is None:
            return
        try:
            drop_replaced_rows(self._replaces_in)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _take_back(self) -> None:
        if self._lock is not None:
            with suppress(OSError):  # the next run truncates a torn line as well
                os.ftruncate(self._fd, self._size)

    def _cannot_write(self, error: OSError) -> BatchError:
        if self.is_stream:
            return BatchError(f"{self.name} cannot be written: {error.strerror}")
        if error.errno in _NO_SPACE:
            return BatchError(
                f"no space left for {self.name} ({error.strerror}); finished rows are safe: free some space and run "
                "the same command again to go on, without --restart if that was given"
            )
        return BatchError(f"{self.name} cannot be written: {error.strerror}; finished rows are safe")


def open_journal(
    output: str, fingerprint: Fingerprint, *, source: str, restart: bool = False, retry_errors: bool = False
) -> Journal:
    """Begin an output, or go on with what an earlier run of the same fingerprint left.

    `output` is a path, or `-` for stdout. `restart` throws an earlier run's rows away; with `retry_errors` the failed
    ones run again, and each stays until another replaces it. Rows run again are appended, so they leave input order.
    Raises `BatchError`, and then the output is untouched.
    """
    if output == STDOUT:
        if sys.stdout is None:
            raise BatchError("rows go to stdout, which is closed; give -o OUT.jsonl, or send stdout somewhere")
        return Journal(sys.stdout.fileno(), "stdout", FinishedRows(), lock=None, size=0)
    path = Path(os.path.realpath(output))
    if path == Path(os.path.realpath(source)):
        raise BatchError(f"the output {output} is the input itself; choose another -o")
    try:
        if path.is_dir():
            raise BatchError(f"the output {output} is a folder; choose another -o")
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            return Journal(os.open(path, os.O_WRONLY), output, FinishedRows(), lock=None, size=0)
        lock = OutputLock(path)
    except OSError as error:
        raise BatchError(f"the output {output} cannot be opened: {error.strerror}; choose another -o") from None
    try:
        return _resume(path, output, fingerprint, lock, restart=restart, retry_errors=retry_errors)
    except OSError as error:
        lock.release()
        if error.errno in _NO_SPACE:
            raise BatchError(
                f"no space left beside {output} ({error.strerror}); free some, or choose another -o"
            ) from None
        raise BatchError(f"the output {output} cannot be opened: {error.strerror}; choose another -o") from None
    except BaseException:
        lock.release()
        raise


def _resume(
    path: Path, name: str, fingerprint: Fingerprint, lock: OutputLock, *, restart: bool, retry_errors: bool
) -> Journal:
    if restart:
        # Before the fingerprint: a crash in between must not leave old rows under the new one.
        path.unlink(missing_ok=True)
    if path.exists() and path.stat().st_size:
        fingerprints.check(fingerprint, path)
        found = recover(path)
        if found.replaced.count:  # the run that replaced them was killed
            drop_replaced_rows(path)
            found = recover(path)
    else:
        fingerprints.save(fingerprint, path)
        found = Recovered()
    retries = retry_errors and found.finished.remove_failed()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, found.size)
    except BaseException:
        os.close(fd)
        raise
    return Journal(fd, name, found.finished, lock=lock, size=found.size, replaces_in=path if retries else None)


_encoder = msgspec.json.Encoder()


def answer_row(line: int, crc: int, custom_id: str, status: int, request_id: str, body: dict[str, Any]) -> bytes:
    """An output row with an HTTP-like response."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _encoder.encode({"id": row_id(line, crc), "custom_id": custom_id, "response": response, "error": None})


def error_row(line: int, crc: int, custom_id: str | None, code: str, message: str) -> bytes:
    """An output row for a line that never became a request."""
    error = {"code": code, "message": f"line {line}: {message}", "line": line}
    return _encoder.encode({"id": row_id(line, crc), "custom_id": custom_id, "response": None, "error": error})
