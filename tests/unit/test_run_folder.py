"""The private run folder: what is said where it cannot be made or written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corellm.comms import run_folder
from corellm.comms.run_folder import RunFolder
from corellm.comms.settings import Launch, write_launch
from corellm.config import EngineOptions
from corellm.errors import RunFolderError


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # without a name, as a write has it


STEPS: list[tuple[str, str, Callable[[RunFolder], object]]] = [
    ("pathlib.Path.mkdir", "corellm", lambda _: run_folder.root()),
    ("pathlib.Path.mkdir", "", lambda _: run_folder.create()),
    ("pathlib.Path.write_bytes", "options.json", lambda folder: write_launch(folder, Launch(EngineOptions(), "m"))),
    ("os.open", "lock", RunFolder.lock),
]


@pytest.mark.parametrize(("call", "name", "step"), STEPS)
def test_a_full_disk_is_said_of_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, name: str, step: Callable[[RunFolder], object]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = run_folder.create()
    monkeypatch.setattr(call, full)
    where = f"{tmp_path}.*{name}"
    with pytest.raises(RunFolderError, match=f"the run folder .* {where}: No space left .*XDG_RUNTIME_DIR"):
        step(folder)


def test_last_words_that_found_no_space_say_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.last_words() is None
    folder.write_last_words("engine_dead", "it was stopped")
    assert folder.last_words() == ("engine_dead", "it was stopped")
    (tmp_path / "last_words").write_bytes(b"")
    code, message = folder.last_words() or ("", "")
    assert code == RunFolderError.code
    assert f"{tmp_path}: No space left" in message
