"""The command as a process: how it ends, and what it leaves on the streams and the terminal that it was given."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from corellm_cli.exit_codes import ExitCode
from tests.support.launched_engine import PROMPTS, write_rows


def environment() -> dict[str, str]:
    """Our own, in which a child can import what we can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


INTERRUPTED_EARLY = """
import os, signal, sys, time
import corellm.running_engines

def find(options, report):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)

corellm.running_engines.find = find
from corellm_cli.main import main
sys.argv = ["corellm", "batch", "in.jsonl", "--model", "m"]
main()
"""


def test_ctrl_c_while_the_model_is_looked_for_ends_at_once() -> None:
    write_rows(*PROMPTS)
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_EARLY], stderr=subprocess.PIPE, timeout=20, text=True, env=environment()
    )
    assert done.returncode == ExitCode.INTERRUPTED
    assert done.stderr.splitlines()[-1] == "interrupted before the first row; nothing was generated"


INTERRUPTED_IMPORT = """
import sys

interrupted = sys.argv[1]

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == interrupted:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from corellm_cli.main import main
sys.argv = ["corellm", "batch", "in.jsonl"]
main()
"""


@pytest.mark.parametrize("module", ["typer", "corellm.config", "corellm_cli.top", "corellm.batch.journal", "msgspec"])
def test_ctrl_c_while_modules_are_read_is_no_traceback(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, module],
        capture_output=True,
        timeout=20,
        text=True,
        env=environment(),
    )
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.INTERRUPTED, "", "")


UNREAD = """
import sys
import corellm.running_engines
import corellm_cli.batch_run as batch_run
from pathlib import Path
from tests.support.launched_engine import Launched, found

engine = Launched()

def find(options, report):
    return found(options, Path(), engine)

async def start(model, report):
    return engine

corellm.running_engines.find = find
batch_run.TextEngine.start = start
from corellm_cli.main import main
sys.argv = ["corellm", "batch", "in.jsonl", "-o", "-", "--model", "m"]
main()
"""


def test_a_second_ctrl_c_ends_a_run_whose_rows_nobody_reads() -> None:
    write_rows(*({"prompt": "x" * 190, "max_tokens": 1} for _ in range(2000)))
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        os.set_blocking(process.stdout.fileno(), True)
        assert process.stdout.read(1) == "{"  # it writes; from here on nobody reads
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert "stopping: " in next(line for line in process.stderr if "stopping" in line)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=4) == ExitCode.INTERRUPTED  # the grace alone is 5 s
    finally:
        process.kill()
        process.communicate()


def test_rows_and_a_bar_never_share_a_terminal() -> None:
    write_rows(*PROMPTS)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD], stdout=theirs, stderr=theirs, env=environment() | {"TERM": "xterm-256color"}
    )
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # Linux says EIO when the other side is closed
        while piece := os.read(ours, 1 << 16):
            text += piece
    os.close(ours)
    assert process.wait(timeout=20) == ExitCode.OK
    rows = text[text.index(b"ready: ") :]
    assert b"\x1b[?25l" not in rows  # no cursor is hidden: nothing is live
    assert rows.count(b'{"id":"batch_req_') == 3


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    code = "import sys; from corellm_cli.main import run; sys.exit(run(['--help']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == ExitCode.FAILURE
    assert (
        done.stderr == "error: the output cannot be written: No space left on device; free space, or write elsewhere\n"
    )


def test_a_reader_that_leaves_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "from corellm_cli.main import main; import sys; sys.argv = ['corellm', 'batch', '--help']; main()"
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (ExitCode.FAILURE, b"")
