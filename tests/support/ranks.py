"""Ranks as processes of their own, run by tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping


def run_ranks(module: str, size: int, *arguments: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """What `python -m module RANK SIZE arguments…` prints, for each rank; all must end well."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(size), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} | dict(environment or {}),
        )
        for rank in range(size)
    ]
    try:
        ended = [process.communicate(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0] * size, "".join(err[-3000:] for _, err in ended)
    return [out for out, _ in ended]
