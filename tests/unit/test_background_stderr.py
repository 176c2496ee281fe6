"""A stderr that nobody waits for: over real pipes, some of which nobody reads."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from corellm.background_stderr import BackgroundStderr

LINE = "x" * 99 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """(read end, write end)."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_everything_arrives_in_order(pipe: tuple[int, int]) -> None:
    stream = BackgroundStderr(pipe[1])
    print("one", "two", file=stream)
    stream.write("pro")
    stream.write("mpt")
    stream.flush()
    stream.write(" \ud800é\nlast\n")
    assert stream.drain(5)
    assert os.read(pipe[0], 1000).decode() == "one two\nprompt \\ud800é\nlast\n"


def test_lines_of_processes_that_share_a_pipe_do_not_cut_into_each_other(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda fd, data: pieces.append(bytes(data)) or len(data))
    lines = [b"x" * (number % 300) + b"\n" for number in range(1000)] + [b"long" * 5000 + b"\n"]
    assert BackgroundStderr(pipe[1])._write(lines) == len(lines)
    assert b"".join(pieces) == b"".join(lines)
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert all(len(piece) <= select.PIPE_BUF or piece.count(b"\n") == 1 for piece in pieces)
    assert len(pieces) < 100


def test_a_reader_that_stalls_costs_lines_and_no_time_and_is_told_how_many(pipe: tuple[int, int]) -> None:
    stream = BackgroundStderr(pipe[1], held_bytes=100_000)
    began = time.monotonic()
    for number in range(5000):  # far more than the pipe and the stream together hold
        stream.write(f"{number:99}\n")
    assert time.monotonic() - began < 2
    assert not stream.drain(0.05)
    following = lost = 0  # the number of the line that must come next, and how many are told as lost
    with os.fdopen(os.dup(pipe[0])) as reader:
        while following < 5000:
            line = reader.readline()
            if line.startswith("("):
                lost += int(line[1:].split()[0])
                following += int(line[1:].split()[0])
            else:
                assert int(line) == following
                following += 1
        assert 3000 < lost <= 4000  # the stream holds 100 kB, the pipe some of it
        stream.write("on again\n")
        assert reader.readline() == "on again\n"
    assert stream.drain(5)


def test_what_cannot_be_written_is_counted_once_it_can(pipe: tuple[int, int]) -> None:
    """A full disk that gets room again."""
    full = os.open("/dev/full", os.O_WRONLY)
    fd = os.dup(full)
    try:
        stream = BackgroundStderr(fd)
        for _ in range(3):
            stream.write("a\nb\n")
            assert stream.drain(5)
        os.dup2(pipe[1], fd)
        stream.write("c\n")
        assert stream.drain(5)
        assert os.read(pipe[0], 1000) == b"(6 lines of this log are lost: they could not be written)\nc\n"
    finally:
        os.close(full)
        os.close(fd)


def test_threads_lose_and_mix_no_lines(pipe: tuple[int, int]) -> None:
    stream = BackgroundStderr(pipe[1])
    writers = [threading.Thread(target=lambda: [stream.write(LINE) for _ in range(200)]) for _ in range(8)]
    for writer in writers:
        writer.start()
    data = b""
    while len(data) < 8 * 200 * len(LINE):
        data += os.read(pipe[0], 1 << 16)
    for writer in writers:
        writer.join()
    assert data == LINE.encode() * 1600


INSTALLED = """
import sys
from corellm import background_stderr
background_stderr.install()
print("y" * 300_000, file=sys.stderr)
print("the end", file=sys.stderr)
sys.exit(7)
"""


def test_a_process_leaves_though_nobody_reads() -> None:
    with subprocess.Popen([sys.executable, "-c", INSTALLED], stderr=subprocess.PIPE) as process:
        assert process.wait(10) == 7


def test_a_process_that_leaves_has_written_everything() -> None:
    done = subprocess.run([sys.executable, "-c", INSTALLED], capture_output=True, timeout=10)
    assert (done.returncode, done.stderr) == (7, b"y" * 300_000 + b"\nthe end\n")


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_a_process_runs_with_a_stderr_that_takes_nothing(redirection: str) -> None:
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, INSTALLED]
    assert subprocess.run(command, timeout=10).returncode == 7
