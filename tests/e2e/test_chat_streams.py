"""`corellm chat` and its standard streams: closed, full, silent, endless, of other bytes than text."""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chat_server import ChatServer, chat_server

CORELLM = str(Path(sys.executable).with_name("corellm"))
WAIT_S = 30
CLOSED = "error: stdout is closed, so there is nowhere to write to; send it to a file, a pipe or /dev/null\n"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server(lambda body: ["an ", "answer"]) as started:
        yield started


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    changed = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_RUNTIME_DIR": str(tmp_path), "PYTHONUTF8": "1"}
    return os.environ | changed


def shell(line: str, env: dict[str, str], *words: str, piped: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a line of the shell, in which `corellm` is `$0` and what is after it `$@`."""
    command = ["timeout", "--kill-after=1", str(WAIT_S), "bash", "-c", line, CORELLM, *words]  # all of the line's
    return subprocess.run(command, input=piped, capture_output=True, timeout=2 * WAIT_S, check=False, env=env)


@pytest.mark.parametrize("command", ["chat -p hi", "chat", "top --once", "top --json"])
def test_a_closed_stdout_is_told(command: str, env: dict[str, str]) -> None:
    done = shell(f'"$0" {command} >&-', env)
    assert (done.returncode, done.stderr.decode()) == (2, CLOSED)


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full", "2>&- <&-"])
def test_an_answer_comes_wherever_stderr_goes(stderr: str, server: ChatServer, env: dict[str, str]) -> None:
    (Path(env["XDG_STATE_HOME"]) / "corellm").mkdir(parents=True)
    (Path(env["XDG_STATE_HOME"]) / "corellm/sessions").touch()  # so that there is something to tell on it
    for words, code in ((("-p", "hi"), 0), (("-p", "hi", "--session", "x"), 1)):
        done = shell(f'"$0" chat --url {server.url} "$@" {stderr}', env, *words)
        assert (done.returncode, done.stdout) == (code, b"an answer\n")


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_an_error_that_cannot_be_told_has_its_exit_code(stderr: str, env: dict[str, str]) -> None:
    done = shell(f'"$0" chat -p hi --tools /no/such/file {stderr}', env)
    assert (done.returncode, done.stdout) == (2, b"")


def test_an_answer_that_was_to_be_saved_and_is_not_fails_after_it(server: ChatServer, env: dict[str, str]) -> None:
    (Path(env["XDG_STATE_HOME"]) / "corellm").mkdir(parents=True)
    sessions = Path(env["XDG_STATE_HOME"]) / "corellm/sessions"
    sessions.touch()
    done = shell(f'"$0" chat --url {server.url} -p hi --session x 2>&1', env)
    answer, notice = done.stdout.decode().splitlines()
    assert answer == "an answer"
    assert notice.startswith(f"the session is not saved: {sessions}")
    assert done.returncode == 1


def test_a_silent_pipe_is_told_of_and_waited_for(server: ChatServer, env: dict[str, str]) -> None:
    command = [CORELLM, "chat", "--url", server.url, "-p", "hi"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as waiting:
        try:
            assert waiting.stderr is not None
            assert waiting.stdin is not None
            assert select.select([waiting.stderr], [], [], WAIT_S)[0]
            told = b"reading standard input until it ends; close it, or use </dev/null\n"
            assert waiting.stderr.readline() == told
            waiting.stdin.write(b"late")
            waiting.stdin.flush()
            time.sleep(0.1)
            out, err = waiting.communicate(b" text", timeout=WAIT_S)
        finally:
            waiting.kill()
    assert (waiting.returncode, out, err) == (0, b"an answer\n", b"")
    assert server.bodies[0]["messages"][0]["content"] == "late text\n\nhi"


def test_a_pipe_that_has_begun_is_not_silent(server: ChatServer, env: dict[str, str]) -> None:
    done = shell(f'(echo now; sleep 3; echo later) | "$0" chat --url {server.url}', env)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"an answer\n", b"")
    assert server.bodies[0]["messages"][0]["content"] == "now\nlater"


@pytest.mark.parametrize(
    ("words", "piped", "source", "offset"),
    [
        ("", b"caf\xe9", "standard input", 3),
        ("-p hi", b"\xff", "standard input", 0),
        ("-p $'caf\\xe9'", b"", "--prompt", 3),
        ("-p hi --system $'\\xc3\\xa9\\xe9'", b"", "--system", 2),
        ("-p hi --date $'\\xe9'", b"", "--date", 0),
        ("-p hi --stop a --stop $'b\\xe9'", b"", "--stop", 1),
        ("-p hi --system @latin1", b"", "--system: latin1", 4),
        ("-p hi --tools latin1", b"", "--tools: latin1", 4),
    ],
)
def test_other_bytes_than_text_are_refused(
    words: str, piped: bytes, source: str, offset: int, server: ChatServer, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "latin1").write_bytes(b"[\xc3\xa9]\xe9")
    done = shell(f'cd {shlex.quote(str(tmp_path))}; "$0" chat --url {server.url} {words}', env, piped=piped)
    byte = (piped or b"\xe9")[-1]
    message = f"error: {source} is not UTF-8 text: the byte at offset {offset} is 0x{byte:02x}; convert it"
    assert done.stderr.decode().startswith(message)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert server.bodies == []


@pytest.mark.parametrize("option", ["--system @", "--tools "])
@pytest.mark.parametrize("file", ["/dev/zero", "fifo"])
def test_what_is_no_file_is_not_read(option: str, file: str, env: dict[str, str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    done = shell(f'cd {shlex.quote(str(tmp_path))}; "$0" chat -p hi {option}{file}', env)
    message = f"error: {option.split()[0]}: {file} is no regular file; name one that is\n"
    assert (done.returncode, done.stderr.decode()) == (2, message)


def test_a_pipe_without_an_end_is_refused(env: dict[str, str]) -> None:
    done = shell('"$0" chat </dev/zero', env)
    assert (done.returncode, done.stderr) == (2, b"error: standard input has more than 16,777,216 bytes; give less\n")
