"""The command line: options, exit codes, what goes where, signals. The engine is a fake; everything else is real."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import corellm.batch.fingerprint
from corellm import found_model, running_engines, text_engine
from corellm.batch.journal import Journal
from corellm.comms.messages import Progress
from corellm.comms.settings import Settings
from corellm.config import EngineOptions, env_name, flag_name
from corellm.errors import CoreLLMError, EngineDeadError, RequestFailedError, StartupError
from corellm_cli.batch import default_output
from corellm_cli.exit_codes import ExitCode
from corellm_cli.main import run
from tests.support.fake_text_engine import FakeTextEngine

Run = Callable[..., int]


class Launched(FakeTextEngine):
    """The fake as `TextEngine.start` would return it."""

    closed = False

    def behave(
        self,
        *,
        delay: Callable[[str], float] = lambda text: 0.0,
        failure: Callable[[str], CoreLLMError | None] = lambda text: None,
    ) -> None:
        """From now on: the seconds that a prompt takes, the error that it ends in."""
        self._delay, self._failure = delay, failure

    def latest_stats(self) -> None:
        return None

    async def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _isolated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """No options from the environment, no GPU, a folder of its own, and logging as it was."""
    for spec in fields(EngineOptions):
        monkeypatch.delenv(env_name(spec.name), raising=False)
    monkeypatch.setenv("NO_COLOR", "1")  # also restores it where a test's --no-color sets it
    monkeypatch.setattr(found_model, "gpu_count", lambda: 0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))  # no engine of anyone's to join
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("corellm")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture
def engine() -> Launched:
    return Launched()


def settings(given: EngineOptions, folder: Path) -> Settings:
    """What the options come to on a model in `folder`."""
    known = {name: value for name, value in asdict(given).items() if name in Settings.__struct_fields__}
    decided = {"model_path": str(folder), "name": "n", "dtype": "float32", "device": "cpu", "threads": 1}
    decided |= {"page_size": 16, "max_seqs": 4, "max_batch_tokens": 64, "max_model_len": given.max_model_len or 200}
    return Settings(**{**known, **decided})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, engine: Launched, tmp_path: Path) -> list[EngineOptions]:
    """The options of every engine that was started; it is the fake."""
    options: list[EngineOptions] = []

    async def start(model: Any, report: Callable[[Progress], None]) -> Launched:
        options.append(model.options)
        report(Progress(stage="warm up"))
        return engine

    def find(given: EngineOptions, report: Callable[[Progress], None]) -> Any:
        report(Progress(stage="resolve model", detail=str(given.model)))
        return SimpleNamespace(
            options=given,
            launch=SimpleNamespace(model_path=str(tmp_path)),
            settings=settings(given, tmp_path),
            max_request_tokens=engine.info.max_request_tokens,
            vocab=engine.info.vocab,
            encode_prompt=engine.encode_prompt,
            encode_chat=engine.encode_chat,
        )

    monkeypatch.setattr(running_engines, "find", find)
    monkeypatch.setattr(text_engine.TextEngine, "start", start)
    return options


def write_rows(*rows: object) -> str:
    Path("in.jsonl").write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return "in.jsonl"


def answers(path: str = "in.out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


PROMPTS = [{"prompt": f"prompt {number}", "max_tokens": 4} for number in range(3)]


def test_a_run_answers_every_row(started: list[EngineOptions], engine: Launched, capsys: Any) -> None:
    assert run(["batch", write_rows(*PROMPTS)]) == ExitCode.OK
    assert [answer["response"]["status_code"] for answer in answers()] == [200] * 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "done: 3 ok, 0 failed" in err
    assert engine.closed


def test_without_a_model_and_a_gpu_the_demo_is_used_and_named(started: list[EngineOptions], capsys: Any) -> None:
    run(["batch", write_rows(*PROMPTS)])
    assert started[0].model == "demo"
    assert "no --model given and no GPU here: using the demo model" in capsys.readouterr().err


def test_without_a_model_on_a_gpu_machine_one_is_asked_for(
    started: list[EngineOptions], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(found_model, "gpu_count", lambda: 1)
    assert run(["batch", write_rows(*PROMPTS)]) == ExitCode.USAGE
    assert "--model is not given" in capsys.readouterr().err
    assert started == []


def test_every_engine_option_has_a_flag_and_a_variable(
    started: list[EngineOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "model": "m", "tp": 2, "device": "cpu", "dtype": "float16", "max_model_len": 70, "max_batch_tokens": 80,
        "max_seqs": 9, "kv_cache": "naive", "page_size": 8, "gpu_memory": 0.5, "kv_blocks": 11, "load_format": "dummy",
        "seed": 5, "name": "alpha", "log_level": "error",
    }  # fmt: skip
    expected = EngineOptions(**values)  # type: ignore[arg-type]
    flags = [word for name, value in values.items() for word in (flag_name(name), str(value))]
    rows = write_rows(*PROMPTS)
    assert run(["batch", rows, "-o", "a.jsonl", *flags]) == ExitCode.OK
    for name, value in values.items():
        monkeypatch.setenv(env_name(name), str(value))
    assert run(["batch", rows, "-o", "b.jsonl"]) == ExitCode.OK
    assert started == [expected, expected]


def test_sampling_options_hold_where_a_row_does_not_say(started: list[EngineOptions], engine: Launched) -> None:
    rows = write_rows({"prompt": "silent"}, {"prompt": "says", "temperature": 0.5, "max_tokens": 3})
    flags = ["--temperature=0", "--max-tokens=7", "--top-p=0.5", "--top-k=3", "--min-p=0.1", "--seed=9"]
    assert run(["batch", rows, *flags, "--stop", "A", "--stop", "B"]) == ExitCode.OK
    params = {text: params for text, params, _, _ in engine.calls}
    silent, says = params["silent"], params["says"]
    assert (silent.temperature, silent.max_tokens, says.temperature, says.max_tokens) == (0, 7, 0.5, 3)
    assert (silent.top_p, silent.top_k, silent.min_p, silent.stop, silent.seed) == (0.5, 3, 0.1, ("A", "B"), 9)


def test_a_seed_that_is_not_given_is_not_set(started: list[EngineOptions], engine: Launched) -> None:
    run(["batch", write_rows(*PROMPTS)])
    assert {params.seed for _, params, _, _ in engine.calls} == {None}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tp", "0"], "--tp is 0; it must be an integer from 1 to 64"),
        (["--tp", "two"], "--tp is 'two'; it must be an integer from 1 to 64"),
        (["--gpu-memory", "nan"], "--gpu-memory is nan; it must be a number from 0.05 to 1"),
        (["--dtype", "int8"], "--dtype is 'int8'; choose one of auto, bfloat16, float16, float32"),
        (["--temperature", "3"], "--temperature is 3; it must be a number from 0 to 2"),
        (["--temperature", "abc"], "--temperature is 'abc'; it must be a number from 0 to 2"),
        (["--max-tokens", "1.5"], "--max-tokens is '1.5'; it must be an integer from 1 to"),
        (["--stop", ""], "--stop holds ''; each entry must be a non-empty string"),
        (["--min-tokens", "5", "--max-tokens", "4"], "--min-tokens is 5, above max_tokens 4"),
        (["--order", "foo"], "--order is 'foo'; choose one of completion, input"),
        (["--limit", "0"], "--limit is '0'; it must be an integer of at least 1"),
        (["--limit", "x"], "--limit is 'x'; it must be an integer of at least 1"),
        (["--restart", "--retry-errors"], "--restart and --retry-errors contradict each other"),
        (["--restart", "-o", "-"], "--restart needs an output"),
        (["--retry-errors", "-o", "-"], "--retry-errors needs an output"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_2(flags: list[str], says: str, capsys: Any) -> None:
    assert run(["batch", write_rows(*PROMPTS), *flags]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    assert "nvalid value" not in err


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("CORELLM_TP", "x", "CORELLM_TP is 'x'; it must be an integer from 1 to 64"),
        ("CORELLM_DTYPE", "int8", "CORELLM_DTYPE is 'int8'; choose one of auto, "),
        ("CORELLM_MAX_SEQS", "0", "CORELLM_MAX_SEQS is 0; it must be an integer from 1 to 4096"),
    ],
)
def test_a_wrong_variable_is_named(
    name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv(name, value)
    assert run(["batch", write_rows(*PROMPTS)]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith(f"error: {says}")


@pytest.mark.parametrize(
    ("arguments", "says"), [(["batch"], "corellm batch --help"), (["bogus"], "(see corellm --help)")]
)
def test_usage_errors_lead_to_the_right_help(arguments: list[str], says: str, capsys: Any) -> None:
    assert run(arguments) == ExitCode.USAGE
    assert says in capsys.readouterr().err


def test_without_a_command_there_is_help(capsys: Any) -> None:
    assert run([]) == ExitCode.USAGE
    assert "batch" in capsys.readouterr().out


def test_a_missing_input_is_said_before_anything_about_the_model(capsys: Any) -> None:
    assert run(["batch", "nowhere.jsonl"]) == ExitCode.FAILURE
    assert capsys.readouterr().err.startswith("error: the input nowhere.jsonl is not there")


def test_foreign_names_do_not_reach_the_terminal_raw(capsys: Any) -> None:
    assert run(["batch", "\x1b[2J\n.jsonl", "--model", "demo"]) == ExitCode.FAILURE
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert err.count("\n") == 1


def test_row_errors_are_exit_3_also_when_an_earlier_run_had_them(started: list[EngineOptions], capsys: Any) -> None:
    rows = write_rows(*PROMPTS, "not JSON")
    assert run(["batch", rows]) == ExitCode.ROW_ERRORS
    assert "line 4" in capsys.readouterr().err
    assert run(["batch", rows]) == ExitCode.ROW_ERRORS
    err = capsys.readouterr().err
    assert "4 skipped as finished earlier (1 of them errors: --retry-errors runs them again)" in err
    assert len(started) == 1
    assert run(["batch", rows, "--json-summary", "--quiet"]) == ExitCode.ROW_ERRORS
    summary = json.loads(capsys.readouterr().out)
    assert (summary["skipped"], summary["skipped_failed"], summary["failed_with"]) == (4, 1, None)


def test_a_finished_run_starts_no_engine_but_still_compares_the_rows(
    started: list[EngineOptions], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(*PROMPTS)
    assert run(["batch", rows, "--limit", "2"]) == ExitCode.OK
    assert run(["batch", rows, "--limit", "2"]) == ExitCode.OK
    assert run(["batch", rows, "--limit", "1"]) == ExitCode.OK
    assert len(started) == 1
    assert run(["batch", rows]) == ExitCode.OK
    assert len(started) == 2
    write_rows({"prompt": "changed!", "max_tokens": 4}, *PROMPTS[1:])
    monkeypatch.setattr(corellm.batch.fingerprint, "check", lambda *_: None)
    assert run(["batch", rows]) == ExitCode.FAILURE
    assert "line 1 of in.jsonl has changed" in capsys.readouterr().err
    assert len(started) == 2


def test_a_retry_whose_engine_does_not_start_loses_no_row(
    started: list[EngineOptions], engine: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.behave(failure=lambda text: RequestFailedError("broke") if text == "prompt 1" else None)
    assert run(["batch", write_rows(*PROMPTS)]) == ExitCode.ROW_ERRORS
    before = Path("in.out.jsonl").read_bytes()

    async def fail(model: Any, report: Callable[[Progress], None]) -> Launched:
        raise StartupError("no memory")

    monkeypatch.setattr(text_engine.TextEngine, "start", fail)
    assert run(["batch", "in.jsonl", "--retry-errors"]) == ExitCode.FAILURE
    assert Path("in.out.jsonl").read_bytes() == before


def test_a_run_with_other_settings_is_refused_before_an_engine_starts(
    started: list[EngineOptions], capsys: Any
) -> None:
    rows = write_rows(*PROMPTS)
    run(["batch", rows, "--temperature", "0"])
    before = Path("in.out.jsonl").read_bytes()
    assert run(["batch", rows, "--temperature", "1"]) == ExitCode.FAILURE
    assert "temperature" in capsys.readouterr().err
    assert len(started) == 1
    assert Path("in.out.jsonl").read_bytes() == before
    assert run(["batch", rows, "--temperature", "1", "--restart"]) == ExitCode.OK


def test_rows_to_stdout_leave_it_to_rows_alone(started: list[EngineOptions], capfd: Any) -> None:
    assert run(["batch", write_rows(*PROMPTS), "-o", "-", "--json-summary"]) == ExitCode.OK
    out, err = capfd.readouterr()
    assert {json.loads(line)["response"]["status_code"] for line in out.splitlines()} == {200}
    assert json.loads(err.splitlines()[-1])["ok"] == 3


def test_quiet_says_nothing_and_a_json_summary_is_data(started: list[EngineOptions], capsys: Any) -> None:
    assert run(["batch", write_rows(*PROMPTS, "bad"), "--quiet", "--json-summary"]) == ExitCode.ROW_ERRORS
    out, err = capsys.readouterr()
    assert err == ""
    assert (json.loads(out)["ok"], json.loads(out)["failed"]) == (3, 1)


def test_limit_order_and_strict_reach_the_runner(started: list[EngineOptions], engine: Launched) -> None:
    rows = write_rows(*PROMPTS, "bad")
    assert run(["batch", rows, "--limit", "2", "--order", "input", "--strict"]) == ExitCode.OK
    assert [answer["custom_id"] for answer in answers()] == ["row-1", "row-2"]
    assert len(engine.calls) == 2


def test_strict_starts_no_engine_for_a_bad_row_and_leaves_no_output(started: list[EngineOptions], capsys: Any) -> None:
    assert run(["batch", write_rows(*PROMPTS, "bad"), "--strict", "--json-summary"]) == ExitCode.FAILURE
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith("error: --strict: line 4: the line is not JSON")
    assert "check files: failed" in err
    assert (json.loads(out)["ok"], json.loads(out)["failed_with"]) == (0, "batch_failed")
    assert started == []
    assert sorted(os.listdir()) == ["in.jsonl"]


def test_a_dry_run_starts_nothing_and_writes_nothing(started: list[EngineOptions], capsys: Any) -> None:
    assert run(["batch", write_rows(*PROMPTS, "bad"), "--dry-run"]) == ExitCode.ROW_ERRORS
    err = capsys.readouterr().err
    assert "3 rows can run, 1 can not; 24 in" in err
    assert "output" not in err
    assert started == []
    assert sorted(os.listdir()) == ["in.jsonl"]


def test_a_dry_run_shows_every_bad_row(started: list[EngineOptions], capsys: Any) -> None:
    run(["batch", write_rows(*(f"bad {number}" for number in range(40))), "--dry-run"])
    err = capsys.readouterr().err
    assert [number for number in range(1, 42) if f"line {number}: " in err] == list(range(1, 41))


def test_a_strict_dry_run_stops_at_the_first_bad_row(started: list[EngineOptions], capsys: Any) -> None:
    rows = write_rows(PROMPTS[0], "bad", "worse")
    assert run(["batch", rows, "--dry-run", "--strict"]) == ExitCode.FAILURE
    err = capsys.readouterr().err
    assert "error: --strict: line 2: " in err
    assert "stopped: 1 rows can run, 1 can not" in err
    assert "check files: failed" in err
    assert "line 3" not in err


def test_an_output_that_cannot_be_opened_fails_its_own_stage(started: list[EngineOptions], capsys: Any) -> None:
    assert run(["batch", write_rows(*PROMPTS), "-o", "no/such/folder.jsonl"]) == ExitCode.FAILURE
    err = capsys.readouterr().err
    assert "resolve model: done" in err
    assert "check files: failed" in err
    assert started == []


@pytest.mark.parametrize(
    "change", [["--load-format", "dummy"], ["--max-model-len", "100"], ["--top-k", "50"], ["--seed", "3"]]
)
def test_an_output_is_of_one_model_under_one_set_of_settings(
    started: list[EngineOptions], change: list[str], capsys: Any
) -> None:
    rows = write_rows(*PROMPTS)
    assert run(["batch", rows]) == ExitCode.OK
    assert run(["batch", rows, *change]) == ExitCode.FAILURE
    assert change[0].removeprefix("--").replace("-", "_") in capsys.readouterr().err


@pytest.mark.parametrize("change", [["--kv-blocks", "50"], ["--page-size", "8"], ["--order", "input"], ["--strict"]])
def test_what_shapes_no_row_may_change(started: list[EngineOptions], change: list[str], capsys: Any) -> None:
    rows = write_rows(*PROMPTS)
    assert run(["batch", rows, "--limit", "1"]) == ExitCode.OK
    assert run(["batch", rows, *change]) == ExitCode.OK, capsys.readouterr().err
    assert len(answers()) == len(PROMPTS)


def test_what_an_engine_decided_may_change(
    started: list[EngineOptions], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    whole = settings

    def smaller(given: EngineOptions, folder: Path) -> Settings:
        changed = {"max_model_len": 100, "kv_blocks": 7, "page_size": 4, "dtype": "float16"}
        return msgspec.structs.replace(whole(given, folder), **changed)

    rows = write_rows(*PROMPTS)
    assert run(["batch", rows, "--limit", "1"]) == ExitCode.OK
    monkeypatch.setitem(globals(), "settings", smaller)
    assert run(["batch", rows]) == ExitCode.OK, capsys.readouterr().err
    assert len(answers()) == len(PROMPTS)


def test_the_seed_of_dummy_weights_counts_as_one(started: list[EngineOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_rows(*PROMPTS)
    assert run(["batch", rows, "--load-format", "dummy", "--seed", "1"]) == ExitCode.OK
    sidecar = json.loads(Path("in.out.jsonl.run.json").read_text())
    assert (sidecar["model"]["weights_seed"], sidecar["settings"]["seed"]) == (1, 1)


def test_a_pipes_rows_go_to_stdout(started: list[EngineOptions], capfd: Any) -> None:
    os.mkfifo("pipe")
    rows = "".join(json.dumps(row) + "\n" for row in PROMPTS)
    feeding = threading.Thread(target=Path("pipe").write_text, args=(rows,))
    feeding.start()
    assert run(["batch", "pipe"]) == ExitCode.OK
    feeding.join()
    assert len(capfd.readouterr().out.splitlines()) == 3
    assert os.listdir() == ["pipe"]


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


def _signalled(number: signal.Signals, *, when: bool) -> float:
    """Send ourselves the signal; 0 seconds."""
    if when:
        os.kill(os.getpid(), number)
    return 0.0


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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_EARLY], stderr=subprocess.PIPE, timeout=20, text=True, env=environment
    )
    assert done.returncode == ExitCode.INTERRUPTED
    assert done.stderr.splitlines()[-1] == "interrupted before the first row; nothing was generated"


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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, module], capture_output=True, timeout=20, text=True, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.INTERRUPTED, "", "")


UNREAD = """
import asyncio, sys
import corellm.running_engines
import corellm_cli.batch_run as batch_run
from pathlib import Path
from types import SimpleNamespace
from tests.unit.test_cli import Launched, settings

engine = Launched()

def find(options, report):
    return SimpleNamespace(launch=SimpleNamespace(model_path=""), settings=settings(options, Path()),
                           max_request_tokens=200, vocab=256,
                           encode_prompt=engine.encode_prompt, encode_chat=engine.encode_chat)

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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    environment |= {"TERM": "xterm-256color"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", UNREAD], stdout=theirs, stderr=theirs, env=environment)
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


def test_a_traceback_comes_only_with_debug(started: list[EngineOptions], engine: Launched, capsys: Any) -> None:
    engine.behave(failure=lambda text: EngineDeadError("gone"))
    rows = write_rows(*PROMPTS)
    run(["batch", rows])
    assert "Traceback" not in capsys.readouterr().err
    run(["batch", rows, "--log-level", "debug"])
    assert "Traceback" in capsys.readouterr().err


def test_a_failed_request_is_a_row_error(started: list[EngineOptions], engine: Launched) -> None:
    engine.behave(failure=lambda text: RequestFailedError("broke") if text == "prompt 1" else None)
    assert run(["batch", write_rows(*PROMPTS)]) == ExitCode.ROW_ERRORS
    assert sorted(answer["response"]["status_code"] for answer in answers()) == [200, 200, 500]


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


@pytest.mark.parametrize(
    ("input", "output"),
    [("a/in.jsonl", "a/in.out.jsonl"), ("in.jsonl.gz", "in.out.jsonl"), ("in.txt", "in.txt.out.jsonl"), ("-", "-")],
)
def test_default_output(input: str, output: str) -> None:
    assert default_output(input) == output
