"""Private run folders: where one engine's sockets live, and how others find it.

Every engine has a folder of its own with a random name (mode 0700) below a per-user root. It holds the engine's ipc
sockets, `options.json` (what it was started with), `settings.json` (what it made of that), `engine.json` (written when
it is ready), `last_words` (written when it leaves) and `lock`, which the engine holds by `flock` for as long as it
lives: a folder whose lock is free is a dead engine's, and is swept away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from corellm.errors import RunFolderError

_LOCK_S = 1.0
_YOUNG_S = 60.0
_LONGEST_SOCKET = 107  # bytes of sun_path on Linux, without the final zero


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths and ipc addresses of one engine."""

    path: Path

    @property
    def options(self) -> Path:
        return self.path / "options.json"

    @property
    def settings(self) -> Path:
        return self.path / "settings.json"

    @property
    def registration(self) -> Path:
        return self.path / "engine.json"

    @property
    def rendezvous(self) -> Path:
        """File store by which ranks find one another."""
        return self.path / "rendezvous"

    @property
    def requests(self) -> str:
        return self._address("requests")

    @property
    def stats(self) -> str:
        return self._address("stats")

    @property
    def watch(self) -> str:
        """Where the engine publishes what dashboards read; `stats` is for front ends."""
        return self._address("watch")

    def worker(self, rank: int) -> str:
        return self._address(f"worker-{rank}")

    @property
    def heartbeats(self) -> str:
        return self._address("heartbeats")

    def _address(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def check_length(self) -> None:
        """Raise `RunFolderError` if a socket's path would be longer than the kernel takes."""
        longest = max(len(os.fsencode(address)) - len("ipc://") for address in (self.heartbeats, self.worker(999)))
        if longest > _LONGEST_SOCKET:
            raise RunFolderError(
                f"sockets in {self.path} would have paths of {longest} bytes, at most {_LONGEST_SOCKET} are allowed; "
                "set XDG_RUNTIME_DIR to a shorter folder"
            )

    def write(self, path: Path, data: bytes) -> None:
        """Write one of the folder's files. Raises `RunFolderError` when there is no space."""
        try:
            path.write_bytes(data)
        except OSError as error:
            raise _unusable(path, error) from None

    def write_last_words(self, code: str, message: str) -> None:
        """What an engine says when it leaves, for a front end that it could not tell any more."""
        with contextlib.suppress(OSError):
            (self.path / "last_words").write_text(f"{code} {message}", encoding="utf-8")

    def last_words(self) -> tuple[str, str] | None:
        """(code, message) of an engine that left in order, None of one that was killed."""
        try:
            code, _, message = (self.path / "last_words").read_text(encoding="utf-8").partition(" ")
        except OSError:
            return None
        if not code:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the file could be made, and not be written
            return RunFolderError.code, _unusable(self.path, full).message
        return code, message

    def lock(self) -> int:
        """Hold the folder for as long as the returned descriptor is open. Raises `RunFolderError` if it is held."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(self.path / "lock", error) from None
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() < deadline:
                    time.sleep(0.02)  # whoever asks `is_alive` holds it for an instant
                    continue
                os.close(descriptor)
                raise RunFolderError(f"run folder {self.path} is in use by another engine; start a new one") from None
            return descriptor

    def is_alive(self) -> bool:
        """Whether an engine holds the lock."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def root() -> Path:
    """The user's private folder of run folders, made if need be.

    Raises `RunFolderError` when it belongs to another user or others may look inside.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        path = Path(runtime) / "corellm"
    else:
        path = Path(tempfile.gettempdir()) / f"corellm-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise _unusable(path, error) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RunFolderError(f"{path} must be a folder of yours with mode 0700; remove it or set XDG_RUNTIME_DIR")
    return path


def _unusable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"the run folder cannot be used: {path}: {error.strerror}; free space there, or set XDG_RUNTIME_DIR to another "
        "folder"
    )


def create() -> RunFolder:
    """A new folder with a random name; folders of dead engines are swept away first. Raises `RunFolderError`."""
    parent = root()
    _sweep(parent)
    folder = RunFolder(parent / secrets.token_hex(6))
    folder.check_length()
    try:
        folder.path.mkdir(mode=0o700)
    except OSError as error:
        raise _unusable(folder.path, error) from None
    return folder


def living() -> list[RunFolder]:
    """The folders of engines that run, whether or not they are ready; the oldest first."""
    folders = []
    for path in root().iterdir():
        with contextlib.suppress(OSError):  # removed in the meantime
            folders.append((path.stat().st_ctime, RunFolder(path)))
    return [folder for _, folder in sorted(folders, key=lambda entry: (entry[0], entry[1].path)) if folder.is_alive()]


def _sweep(parent: Path) -> None:
    for path in parent.iterdir():
        folder = RunFolder(path)
        with contextlib.suppress(OSError):
            # A young folder may be one whose engine has not come to lock it yet.
            if time.time() - path.stat().st_mtime > _YOUNG_S and not folder.is_alive():
                folder.remove()
