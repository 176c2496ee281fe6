"""What `corellm batch` says when something outside of it goes wrong: files, streams, signals, the engine, the disk."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import corellm.batch.fingerprint
from corellm import running_engines, text_engine
from corellm.batch.journal import Journal
from corellm.comms.messages import Progress
from corellm.config import EngineOptions
from corellm.errors import EngineDeadError
from corellm_cli.exit_codes import ExitCode
from corellm_cli.main import run
from tests.support.launched_engine import PROMPTS, Launched, answers, write_rows


def test_a_missing_input_is_said_before_anything_about_the_model(capsys: Any) -> None:
    assert run(["batch", "nowhere.jsonl"]) == ExitCode.FAILURE
    assert capsys.readouterr().err.startswith("error: the input nowhere.jsonl is not there")


def test_foreign_names_do_not_reach_the_terminal_raw(capsys: Any) -> None:
    assert run(["batch", "\x1b[2J\n.jsonl", "--model", "demo"]) == ExitCode.FAILURE
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert err.count("\n") == 1


def test_an_output_that_cannot_be_opened_fails_its_own_stage(started: list[EngineOptions], capsys: Any) -> None:
    assert run(["batch", write_rows(*PROMPTS), "-o", "no/such/folder.jsonl"]) == ExitCode.FAILURE
    err = capsys.readouterr().err
    assert "resolve model: done" in err
    assert "check files: failed" in err
    assert started == []


LONG = "n" * 300
UNUSABLE = [
    (["locked/in.jsonl"], "the input locked/in.jsonl cannot be read: Permission denied"),
    ([f"{LONG}.jsonl"], f"the input {LONG}.jsonl cannot be read: File name too long"),
    (["in.jsonl/in.jsonl"], "the input in.jsonl/in.jsonl cannot be read: Not a directory"),
    (["loop"], "the input loop cannot be read: Too many levels of symbolic links"),
    (["in.jsonl", "-o", "locked/out.jsonl"], "the output locked/out.jsonl cannot be opened: Permission denied"),
    (["in.jsonl", "-o", LONG], f"the output {LONG} cannot be opened: File name too long"),
    (["in.jsonl", "-o", "n" * 245], f"the output {'n' * 245} cannot be opened: File name too long"),  # its sidecar's
]


@pytest.mark.parametrize(("words", "says"), UNUSABLE)
def test_a_path_that_cannot_be_used_is_one_line(
    started: list[EngineOptions], words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def denied(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("locked/", f"{os.getcwd()}/locked/")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))  # to root as well
        return stat(path, *args, **options)

    write_rows(*PROMPTS)
    os.symlink("loop", "loop")
    stat = os.stat
    monkeypatch.setattr(os, "stat", denied)
    assert run(["batch", *words]) == ExitCode.FAILURE
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {says}")
    assert started == []


@pytest.mark.parametrize(
    ("stream", "words", "says"),
    [
        ("stdin", ["-", "-o", "out.jsonl"], "the input is standard input, which is closed"),
        ("stdout", ["in.jsonl", "-o", "-"], "rows go to stdout, which is closed"),
    ],
)
def test_a_closed_stream_is_one_line(
    started: list[EngineOptions], stream: str, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write_rows(*PROMPTS)
    monkeypatch.setattr(sys, stream, None)
    assert run(["batch", *words]) == ExitCode.FAILURE
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {says}")
    assert started == []


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), "a/b: Permission denied"),
        (FileExistsError(errno.EEXIST, "File exists", "a", None, "b"), "a and b: File exists"),
        (OSError(errno.ENOSPC, "No space left on device", "a"), "a: No space left on device"),
        (OSError("out of luck"), "out of luck"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_of_the_system_is_one_line_and_a_traceback_comes_with_debug(
    started: list[EngineOptions], error: OSError, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(*_: Any) -> None:
        raise error

    rows = write_rows(*PROMPTS)
    monkeypatch.setattr(running_engines, "find", fail)
    assert run(["batch", rows]) == ExitCode.FAILURE
    assert capsys.readouterr().err.splitlines() == [f"error: {says}"]
    assert run(["batch", rows, "--log-level", "debug"]) == ExitCode.FAILURE
    assert "Traceback" in capsys.readouterr().err


def test_a_traceback_comes_only_with_debug(started: list[EngineOptions], engine: Launched, capsys: Any) -> None:
    engine.behave(failure=lambda text: EngineDeadError("gone"))
    rows = write_rows(*PROMPTS)
    run(["batch", rows])
    assert "Traceback" not in capsys.readouterr().err
    run(["batch", rows, "--log-level", "debug"])
    assert "Traceback" in capsys.readouterr().err


def _signalled(number: signal.Signals, *, when: bool) -> float:
    """Send ourselves the signal; 0 seconds."""
    if when:
        os.kill(os.getpid(), number)
    return 0.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_finishes_what_is_in_flight(
    started: list[EngineOptions], engine: Launched, number: signal.Signals, capsys: Any
) -> None:
    engine.behave(delay=lambda text: _signalled(number, when=text == "prompt 0") or 0.05)
    rows = write_rows(*PROMPTS)
    assert run(["batch", rows]) == ExitCode.INTERRUPTED
    assert "run the same command again to go on" in capsys.readouterr().err
    assert engine.cancelled == 0
    assert engine.closed
    engine.behave(delay=lambda text: 0.0)
    assert run(["batch", rows]) == ExitCode.OK
    assert sorted(answer["custom_id"] for answer in answers()) == ["row-1", "row-2", "row-3"]


def test_a_second_signal_stops_now(started: list[EngineOptions], engine: Launched) -> None:
    again = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()

    def signalled_twice(text: str) -> float:
        if text == "prompt 0":
            os.kill(os.getpid(), signal.SIGINT)
            again.start()
        return 60.0

    engine.behave(delay=signalled_twice)
    assert run(["batch", write_rows(*PROMPTS)]) == ExitCode.INTERRUPTED
    assert time.monotonic() - began < 3.0  # the grace alone is 5 s
    assert engine.cancelled > 0
    assert answers() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_the_engine_starts_is_said(
    started: list[EngineOptions], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    async def start(model: Any, report: Callable[[Progress], None]) -> Launched:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)
        return Launched()

    monkeypatch.setattr(text_engine.TextEngine, "start", start)
    began = time.monotonic()
    assert run(["batch", write_rows(*PROMPTS)]) == ExitCode.INTERRUPTED
    assert time.monotonic() - began < 5
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted before the first row; nothing was generated"


def test_the_death_of_the_engine_is_exit_1_and_can_be_resumed(
    started: list[EngineOptions], engine: Launched, capsys: Any
) -> None:
    engine.behave(failure=lambda text: EngineDeadError("the engine was killed by SIGKILL"))
    assert run(["batch", write_rows(*PROMPTS)]) == ExitCode.FAILURE
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == "error: the engine was killed by SIGKILL"
    assert "run the same command again" in err
    assert "failed: 0 ok, 0 failed" in err
    assert run(["batch", "in.jsonl", "--json-summary", "--quiet"]) == ExitCode.FAILURE
    assert json.loads(capsys.readouterr().out)["failed_with"] == "engine_dead"
    engine.behave()
    assert run(["batch", "in.jsonl"]) == ExitCode.OK


def test_a_full_disk_ends_with_a_summary(started: list[EngineOptions], capsys: Any) -> None:
    assert run(["batch", write_rows(*PROMPTS), "-o", "/dev/full", "--json-summary"]) == ExitCode.FAILURE
    out, err = capsys.readouterr()
    assert json.loads(out)["failed_with"] == "batch_failed"
    assert "No space left" in err


GO_ON = "run the same command again"


@pytest.mark.parametrize("number", [signal.SIGINT, None])
def test_only_what_can_go_on_is_said_to(
    started: list[EngineOptions], engine: Launched, number: signal.Signals | None, capfd: Any
) -> None:
    """An interrupted or orphaned run goes on by its file, one to stdout does not."""
    dead = EngineDeadError("gone")
    engine.behave(
        failure=lambda text: dead if number is None else None,
        delay=lambda text: 0.0 if number is None else _signalled(number, when=text == "prompt 1"),
    )
    rows = write_rows(*PROMPTS)
    for output, times in (("out.jsonl", 1), ("-", 0)):
        assert run(["batch", rows, "-o", output]) in (ExitCode.FAILURE, ExitCode.INTERRUPTED)
        assert capfd.readouterr().err.count(GO_ON) == times


def test_a_refusal_is_not_told_to_run_again(
    started: list[EngineOptions], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(corellm.batch.fingerprint, "check", lambda *_: None)
    rows = write_rows(*PROMPTS)
    assert run(["batch", rows, "--limit", "2"]) == ExitCode.OK
    capsys.readouterr()
    write_rows({"prompt": "changed!", "max_tokens": 4}, *PROMPTS[1:])
    assert run(["batch", rows]) == ExitCode.FAILURE
    err = capsys.readouterr().err
    assert "line 1 of in.jsonl has changed" in err
    assert GO_ON not in err
    assert run(["batch", rows, "-o", "/dev/full"]) == ExitCode.FAILURE
    assert GO_ON not in capsys.readouterr().err


def test_a_full_disk_is_said_once(started: list[EngineOptions], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def full(journal: Journal, row: bytes) -> None:
        raise journal._cannot_write(OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(Journal, "append", full)
    assert run(["batch", write_rows(*PROMPTS)]) == ExitCode.FAILURE
    err = capsys.readouterr().err
    assert err.count(GO_ON) == err.count("finished rows are safe") == 1
