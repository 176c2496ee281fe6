"""A message in the user's own editor."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from corellm.chat.files import TEXT_BYTES, read_bounded, utf8
from corellm.errors import ChatError

_USUAL = ("editor", "nano", "vi")  # where neither VISUAL nor EDITOR is set


def edit_text(text: str) -> str:
    """What the user makes of `text`; the same text if the editor says that it failed, as vi does after `:cq`.

    Waits for the editor. Raises `ChatError` when there is none, or when what it saves is no text.
    """
    command = _editor()
    try:
        with tempfile.TemporaryDirectory(prefix="corellm-") as folder:  # mode 0700; editors may replace the file
            path = Path(folder) / "message.md"
            path.write_bytes(text.encode("utf-8", "replace"))
            if not _run([*command, str(path)]):
                return text
            return utf8(read_bounded(path, TEXT_BYTES), "what the editor saved").removesuffix("\n")
    except OSError as error:
        raise ChatError(
            f"there is no place for a file to edit: {error.strerror}; free space, or set TMPDIR to a folder of yours"
        ) from None


def _run(command: list[str]) -> bool:
    """Whether the editor says that all went well."""
    try:
        return subprocess.call(command) == 0
    except OSError as error:
        raise ChatError(
            f"{command[0]} cannot be run: {error.strerror}; set EDITOR to the command of an editor"
        ) from None


def _editor() -> list[str]:
    """Its command line, without the file."""
    given = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    try:
        command = shlex.split(given) if given else [name for name in _USUAL if shutil.which(name)][:1]
    except ValueError as error:
        raise ChatError(f"EDITOR is {given!r}: {error}; set it to the command of an editor") from None
    if not command:
        raise ChatError("there is no editor; set EDITOR to the command of one")
    return command
