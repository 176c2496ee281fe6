"""Ranks as processes of their own, run by tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

LIMIT_S = 120


def run_ranks(module: str, size: int, *arguments: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """What `python -m module RANK SIZE arguments…` prints, for each rank; all must end well.

    When one fails the others, who may wait for it, are ended.
    """
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryFile("w+") as errors:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), str(size), *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | loopback | dict(environment or {}),
            )
            for rank in range(size)
        ]
        deadline = time.monotonic() + LIMIT_S
        try:
            while None in (codes := [rank.poll() for rank in ranks]):
                assert not any(codes), f"ranks ended with {codes}"
                assert time.monotonic() < deadline, f"after {LIMIT_S} s ranks are still running: {codes}"
                time.sleep(0.05)
            assert not any(codes), f"ranks ended with {codes}"
            return [rank.stdout.read() for rank in ranks if rank.stdout]
        except AssertionError as error:
            errors.seek(0)
            error.add_note(errors.read()[-3000:])
            raise
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
