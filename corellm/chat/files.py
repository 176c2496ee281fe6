"""Files that a user names, read up to a bound: what is no file, or has no end, must not take a chat with it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from corellm.errors import ChatError

TEXT_BYTES = 2**24  # of a piped text, a system message or a list of tools: no context holds as much
_NONE_THERE = "check the path"
_REMEDIES = {
    errno.ENOENT: _NONE_THERE,
    errno.ENOTDIR: _NONE_THERE,
    errno.EACCES: "choose a file that you may read",
    errno.EPERM: "choose a file that you may read",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def read_bounded(path: Path, most: int) -> bytes:
    """A regular file of at most `most` bytes. Raises `ChatError`, naming the file, for any other."""
    try:
        # Without waiting for whoever may one day write into a FIFO, or becoming ruled by a terminal.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        with open(file, "rb") as opened:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise ChatError(f"{path} is no regular file; name one that is")
            if found.st_size > most:
                raise _too_long(str(path), most)
            data = opened.read(most + 1)  # files of /proc do not say their size
    except (OSError, ValueError) as error:  # a name may hold what no file's name can
        raise file_error(path, error, _REMEDIES, "choose another file") from None
    return bounded(data, most, str(path))


def bounded(data: bytes, most: int, source: str) -> bytes:
    """Raises `ChatError`, naming `source`, for more than `most` bytes."""
    if len(data) > most:
        raise _too_long(source, most)
    return data


def _too_long(source: str, most: int) -> ChatError:
    return ChatError(f"{source} has more than {most:,} bytes; give less")


def read_text(path: Path, most: int = TEXT_BYTES) -> str:
    """The same as UTF-8 text."""
    return utf8(read_bounded(path, most), str(path))


def utf8(data: bytes, source: str) -> str:
    """Raises `ChatError`, naming `source` and the byte, for what is no UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ChatError(
            f"{source} is not UTF-8 text: the byte at offset {error.start} is 0x{data[error.start]:02x}; "
            "convert it, for example by iconv"
        ) from None


def text_or_file(text: str) -> str:
    """`text`, or what stands in the file that it names after an `@`. Raises `ChatError`."""
    return read_text(named(text[1:])).strip() if text.startswith("@") else text


def named(path: str) -> Path:
    """`~` means a home; that of nobody stays as it is written, and is then found to be no folder."""
    return Path(os.path.expanduser(path))


def file_error(path: Path, error: OSError | ValueError, remedies: dict[int, str], otherwise: str) -> ChatError:
    """What `error` means for `path`, and the remedy for its number."""
    if not isinstance(error, OSError):
        return ChatError(f"{path}: {error}; {otherwise}")
    return ChatError(f"{path}: {error.strerror}; {remedies.get(error.errno or 0, otherwise)}")
