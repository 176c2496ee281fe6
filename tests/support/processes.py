"""Processes as the kernel knows them, to prove that none is left."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def engine_processes(run_root: Path) -> dict[int, str]:
    """Engines and workers whose run folder is below `run_root`: pid to module."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and b"-m" in words and any(w.startswith(bytes(run_root)) for w in words):
                    found[int(entry.name)] = words[words.index(b"-m") + 1].decode()
    return found


def pid_of(run_root: Path, module: str) -> int:
    """Of a process that runs, or has been started and is about to."""
    deadline = time.monotonic() + 10
    while True:
        for pid, name in engine_processes(run_root).items():
            if name == module:
                return pid
        assert time.monotonic() < deadline, f"no {module} was there within 10 s"
        time.sleep(0.01)


def wait_until_gone(run_root: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := engine_processes(run_root):
        assert time.monotonic() < deadline, f"still there after {seconds} s: {left}"
        time.sleep(0.05)
