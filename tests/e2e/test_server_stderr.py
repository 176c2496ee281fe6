"""`corellm serve` and its stderr: one that nobody reads, one that is full, and what is said there."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.support.processes import pid_of, wait_until_gone
from tests.support.serve_process import ServeProcess, serving

PIPE_BYTES = 4096
REQUESTS = 200  # whose lines are many times as long


def address_in(pipe: int) -> str:
    """Read until the server says where it serves, and no further."""
    said = b""
    while (found := re.search(rb"serving on (http://[\d.:]+)\b", said)) is None:
        piece = os.read(pipe, PIPE_BYTES)
        assert piece, said
        said += piece
    return found[1].decode()


@pytest.mark.parametrize("options", [[], ["--log-format", "json"], ["--api-workers", "2"]], ids=["text", "json", "two"])
def test_a_log_that_nobody_reads_costs_no_answer_and_no_exit(
    long_tiny: str, tmp_path: Path, options: list[str]
) -> None:
    server = ServeProcess(tmp_path, long_tiny, *options)
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    try:
        with os.fdopen(writing, "wb") as pipe:
            server.launch(pipe)
        server.url = address_in(reading)
        for _ in range(REQUESTS):
            server.get("/v1/models")
        assert server.is_healthy()
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(10) == 0
        wait_until_gone(server.run_root, 2)
    finally:
        server.stop(patience_s=1)
        os.close(reading)


def test_a_log_that_cannot_be_written_costs_nothing(long_tiny: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ServeProcess(tmp_path, long_tiny, "--port", str(port))
    server.url = f"http://127.0.0.1:{port}"
    try:
        with Path("/dev/full").open("wb") as full:
            server.launch(full)
        deadline = time.monotonic() + 60
        while not server.is_healthy():
            assert server.process is not None
            assert server.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "tiny" in server.get("/v1/models")
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(10) == 0
    finally:
        server.stop(patience_s=1)


def test_json_lines_are_all_that_a_program_reads(long_tiny: str, tmp_path: Path) -> None:
    """From the start-up to the error that ends it."""
    with serving(tmp_path, long_tiny, "--log-format", "json", "--api-workers", "2") as server:
        server.get("/v1/models")
        os.kill(pid_of(server.run_root, "corellm.engine"), signal.SIGKILL)
        assert server.wait(10) == 1
        lines = [json.loads(line) for line in server.stderr.splitlines()]
    assert all({"time", "level", "logger"} <= set(line) for line in lines)
    said = [(line["level"], line["message"]) for line in lines if "message" in line]
    assert ("INFO", f"serving on {server.url}") in said
    assert said[-1][0] == "ERROR"
    assert said[-1][1].startswith("error: the engine")
    assert [line["path"] for line in lines if "path" in line] == ["/v1/models"]
