"""Sessions on disk: one JSON file each, in a private folder, always whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from datetime import datetime
from pathlib import Path

from corellm.chat.files import file_error, read_bounded
from corellm.chat.session import Session, from_json, to_json
from corellm.errors import ChatError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
_SUFFIX = ".json"
_SESSION_BYTES = 2**28  # some hundred full contexts of the longest kind; a chat gets slow long before it
_MAY_WRITE = "choose a place that you may write to"
_WRITE_REMEDIES = {
    errno.ENOSPC: "free space or choose another place",
    errno.EDQUOT: "free space or choose another place",
    errno.EACCES: _MAY_WRITE,
    errno.EPERM: _MAY_WRITE,
    errno.EROFS: _MAY_WRITE,
    errno.ENOENT: "make its folder first, or choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
}

# Of a file: (device, inode, time of the last change in ns). Each write makes a new inode.
_Identity = tuple[int, int, int]


def state_folder() -> Path:
    """Where what should outlive a run is kept: `$XDG_STATE_HOME/corellm`. Raises `ChatError` for one without a home."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "corellm"
    except RuntimeError:
        raise ChatError(
            "there is no home folder to keep sessions in; set XDG_STATE_HOME to a folder of yours"
        ) from None


def make_private(folder: Path) -> None:
    """Make a folder that only its user may look into, unless it is there. Raises `ChatError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise file_error(folder, error, {}, "set XDG_STATE_HOME to a folder of yours") from None


class SessionStore:
    """The sessions in one folder. Two chats may use it; neither overwrites what the other has written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, _Identity | None] = {}  # of each file, as this process last read or wrote it

    def new(self) -> Session:
        """A session that has no file yet, named after the moment."""
        return Session(name=self._free(datetime.now().strftime("%Y-%m-%d-%H%M%S")))

    def open(self, name: str) -> Session:
        """The session called `name`, a new one if there is none. Raises `ChatError`."""
        path = self._path(name)
        self._seen[name] = _identity(path)
        if self._seen[name] is None:
            return Session(name=name)
        session = read_session(path)
        session.name = name
        return session

    def peek(self, name: str) -> Session:
        """A session to look at, not to go on with. Raises `ChatError`."""
        return read_session(self._path(name))

    def save(self, session: Session) -> str | None:
        """Write a session whole or not at all.

        If another chat has written the file since, this one goes on under another name, which is returned. Raises
        `ChatError` when it cannot be written.
        """
        renamed = None
        if _identity(self._path(session.name)) != self._seen.get(session.name):
            renamed = session.name = self._free(session.name)
        path = self._path(session.name)
        make_private(self._folder)
        write_session(path, session)
        self._seen[session.name] = _identity(path)
        return renamed

    def names(self) -> list[str]:
        """Every session, the one written last first."""
        files = [(identity[2], path) for path in self._folder.glob(f"*{_SUFFIX}") if (identity := _identity(path))]
        return [path.name.removesuffix(_SUFFIX) for _, path in sorted(files, reverse=True)]

    def latest(self) -> Session:
        """The session that was written last. Raises `ChatError` when there is none."""
        names = self.names()
        if not names:
            raise ChatError(f"--continue: there is no session in {self._folder}; start one with corellm chat")
        return self.open(names[0])

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ChatError(
                f"the session name {name!r} is not allowed; use up to 100 letters, digits and _ . -, a letter or digit "
                "first"
            )
        return self._folder / f"{name}{_SUFFIX}"

    def _free(self, name: str) -> str:
        candidates = (name, *(f"{name[:90]}-{number}" for number in range(2, 10_000)))
        return next(candidate for candidate in candidates if _identity(self._path(candidate)) is None)


def read_session(path: Path) -> Session:
    """The session in a file. Raises `ChatError`, naming the file."""
    return from_json(read_bounded(path, _SESSION_BYTES), str(path))


def write_session(path: Path, session: Session) -> None:
    """Replace a file by a session in one step: a crash, or a full disk, leaves the old one. Raises `ChatError`."""
    draft = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:  # mode 0600
            draft = file.name
            file.write(to_json(session))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except (OSError, ValueError) as error:  # a name may hold what no file's name can
        if draft is not None:
            with contextlib.suppress(OSError):
                os.unlink(draft)
        raise file_error(path, error, _WRITE_REMEDIES, "choose another place") from None


def _identity(path: Path) -> _Identity | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
