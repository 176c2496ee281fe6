"""`corellm top` as a process, beside a real `corellm batch` on a tiny model with few blocks, and over the example."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from corellm.comms.stats_messages import Snapshot
from corellm_tui.top_recording import read_recording
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.processes import pid_of
from tests.support.terminal import Terminal, terminal
from tests.support.tiny_llama import make_tiny_llama

CORELLM = str(Path(sys.executable).with_name("corellm"))
EXAMPLE = Path(__file__).parents[2] / "examples" / "preemption.stats"
ROWS = 60
MAX_TOKENS = 60


def corellm(folder: Path, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """`changes` are variables of its environment."""
    return subprocess.run(
        [CORELLM, *words], env={**os.environ, "XDG_RUNTIME_DIR": str(folder), **changes},
        capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [CORELLM, *words], env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until_ready(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not list((folder / "corellm").glob("*/engine.json")):
        assert time.monotonic() < deadline, "no engine was ready within 60 s"
        time.sleep(0.02)


@pytest.fixture
def batch(tmp_path: Path) -> list[str]:
    """A batch whose sequences do not fit the cache together."""
    model = tmp_path / "tiny"
    model.mkdir()
    make_tiny_llama(model, max_positions=512)
    write_byte_tokenizer(model)
    rows = [
        json.dumps({"prompt": f"one and the same beginning, then {n}", "max_tokens": MAX_TOKENS}) for n in range(ROWS)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(rows) + "\n")
    return [
        "batch", str(tmp_path / "in.jsonl"), "--model", str(model), "--device", "cpu", "--kv-blocks", "24",
        "--page-size", "8", "--max-seqs", "8", "--max-batch-tokens", "64", "--json-summary", "--new-engine",
    ]  # fmt: skip


def test_what_top_says_at_the_end_is_what_the_batch_counted(tmp_path: Path, batch: list[str]) -> None:
    recording = tmp_path / "run.stats"
    with started(tmp_path, *batch) as running:
        until_ready(tmp_path)
        recorded = corellm(tmp_path, "top", "--record", str(recording))
        out, err = running.communicate(timeout=60)
    assert (running.returncode, recorded.returncode) == (0, 0), err + recorded.stderr
    summary = json.loads(out)
    with contextlib.closing(read_recording(recording)) as played:
        snapshots = [event for event in played.between(-1, 999) if isinstance(event, Snapshot)]
    last = snapshots[-1].stats
    assert (last.finished, last.output_tokens) == (summary["ok"], summary["output_tokens"])
    assert (last.running, last.waiting, last.kv.in_use) == (0, 0, 0)
    assert last.preemptions > 0
    assert last.kv.evictions > 0
    assert any(row.wait == "blocks" for snapshot in snapshots for row in snapshot.requests)
    shown = corellm(tmp_path, "top", "--replay", str(recording), "--once").stdout
    assert f"done {ROWS}" in shown
    assert f"{last.kv.evictions:,} evictions" in shown


def test_a_killed_engine_ends_the_stream_with_one_line_and_watchers_leave_it_unharmed(
    tmp_path: Path, batch: list[str]
) -> None:
    with started(tmp_path, *batch) as running:
        until_ready(tmp_path)
        with started(tmp_path, "top", "--json") as stopped, started(tmp_path, "top", "--json") as watching:
            assert watching.stdout is not None
            assert json.loads(watching.stdout.readline())["type"] == "Snapshot"
            stopped.send_signal(signal.SIGSTOP)
            first, later = (json.loads(watching.stdout.readline())["stats"]["steps"] for _ in range(2))
            assert later > first  # nobody waits for the one that stopped reading
            os.kill(pid_of(tmp_path / "corellm", "corellm.engine"), signal.SIGKILL)
            _, err = watching.communicate(timeout=20)
            assert watching.returncode == 1
            assert err.count("\n") == 1
            assert "has ended" in err or "was killed" in err
        assert running.wait(20) == 1


def test_once_without_an_engine_and_contradictions_are_one_line(tmp_path: Path) -> None:
    for words, code, said in (
        (["--once"], 1, "no engine runs; start one with `corellm serve`"),
        (["--engine", "x"], 2, "--engine is 'x'; no engine runs"),
        (["--replay", "a", "--engine", "x"], 2, "--replay plays a file and --engine needs a running engine"),
        (["--record", "a", "--json"], 2, "--record saves the stream and --json prints it"),
        (["--replay", str(tmp_path / "none")], 1, "cannot read the recording"),
    ):
        done = corellm(tmp_path, "top", *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
        assert said in done.stderr


def test_the_example_replays_without_an_engine_as_text_and_as_json(tmp_path: Path) -> None:
    text = corellm(tmp_path, "top", "--replay", str(EXAMPLE), "--once").stdout
    assert "corellm top demo CPU" in text
    lines = corellm(tmp_path, "top", "--replay", str(EXAMPLE), "--json").stdout.splitlines()
    assert len(lines) > 50
    assert json.loads(lines[-1])["stats"]["preemptions"] > 0


@contextlib.contextmanager
def dashboard() -> Iterator[Terminal]:
    """A replay in a terminal, which it must have left as it was by the end of the block."""
    environment = {**os.environ, "TERM": "xterm-256color"}
    with terminal([CORELLM, "top", "--replay", str(EXAMPLE)], env=environment, columns=80, rows=24) as shown:
        shown.wait_for("KV cache")
        yield shown
        assert shown.is_as_before()
        for name in (b"1049", b"1000", b"2004"):  # other screen, mouse, bracketed paste
            assert shown.output.rindex(b"\x1b[?%sl" % name) > shown.output.rindex(b"\x1b[?%sh" % name)
        assert shown.output.rindex(b"\x1b[?25h") > shown.output.rindex(b"\x1b[?25l")  # the cursor


def test_the_dashboard_in_a_terminal_answers_keys_and_leaves_the_terminal_as_it_was() -> None:
    with dashboard() as shown:
        shown.send("?")
        shown.wait_for("one panel alone")
        shown.send("q")  # closes the sheet
        shown.settle()
        shown.send("q")
        assert shown.wait(20) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_terminated_dashboard_leaves_the_terminal_as_it_was(number: int) -> None:
    with dashboard() as shown:
        shown.process.send_signal(number)
        assert shown.wait(20) == 130


def test_a_suspended_dashboard_gives_the_terminal_back_and_draws_all_of_itself_when_it_returns() -> None:
    with dashboard() as shown:
        shown.send(" ")  # from now on nothing changes that would be drawn by itself
        shown.wait_for("paused")
        shown.settle()
        shown.send("\x1a")
        process = psutil.Process(shown.process.pid)
        shown.wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "stop")
        shown.settle()
        assert shown.is_as_before()
        before = len(shown.output)
        process.resume()
        for text in (b"corellm top", b"KV cache", b"Requests", b"paused"):
            shown.wait_until(lambda text=text: text in shown.output[before:], repr(text), 20)  # type: ignore[misc]
        shown.send("q")
        assert shown.wait(20) == 0


def test_a_terminal_without_block_characters_gets_a_picture_all_the_same(tmp_path: Path) -> None:
    done = corellm(tmp_path, "top", "--replay", str(EXAMPLE), "--once", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "corellm top demo CPU" in done.stdout
