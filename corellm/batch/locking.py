"""One run an output: an advisory lock on a file beside it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from corellm.errors import BatchError


class OutputLock:
    """Holds `OUT.lock`, with this process's id in it, until `release`; the kernel releases it when the process dies.

    Raises `BatchError`, naming the other process, when another run holds it.
    """

    def __init__(self, output: Path) -> None:
        self._path = output.with_name(output.name + ".lock")
        self._fd = self._acquire(output)

    def _acquire(self, output: Path) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(fd)
                raise BatchError(
                    f"{output} is in use by another run (process {holder}); wait for it, or use another -o"
                ) from None
            if self._is_current(fd):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
            os.close(fd)  # its holder removed it between our open and our lock

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
