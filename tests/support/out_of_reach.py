"""A file in a folder that may not be entered: root may enter all, so `os.stat` is made to say no."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def put_out_of_reach(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    plain = os.stat

    def stat(path: str | Path, **options: Any) -> os.stat_result:
        if os.fspath(path) == str(file):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path, **options)

    monkeypatch.setattr(os, "stat", stat)
