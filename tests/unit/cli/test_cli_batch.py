"""What a run of `corellm batch` does and says: rows, summaries, dry runs, and going on with an earlier output."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import corellm.batch.fingerprint
from corellm import text_engine
from corellm.comms.messages import Progress
from corellm.comms.settings import Settings
from corellm.config import EngineOptions
from corellm.errors import RequestFailedError, StartupError
from corellm_cli.exit_codes import ExitCode
from corellm_cli.main import run
from tests.support import launched_engine
from tests.support.launched_engine import PROMPTS, Launched, answers, write_rows


def test_a_run_answers_every_row(started: list[EngineOptions], engine: Launched, capsys: Any) -> None:
    assert run(["batch", write_rows(*PROMPTS)]) == ExitCode.OK
    assert [answer["response"]["status_code"] for answer in answers()] == [200] * 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "done: 3 ok, 0 failed" in err
    assert engine.closed


def test_a_failed_request_is_a_row_error(started: list[EngineOptions], engine: Launched) -> None:
    engine.behave(failure=lambda text: RequestFailedError("broke") if text == "prompt 1" else None)
    assert run(["batch", write_rows(*PROMPTS)]) == ExitCode.ROW_ERRORS
    assert sorted(answer["response"]["status_code"] for answer in answers()) == [200, 200, 500]


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


def test_rows_to_stdout_leave_it_to_rows_alone(started: list[EngineOptions], capfd: Any) -> None:
    assert run(["batch", write_rows(*PROMPTS), "-o", "-", "--json-summary"]) == ExitCode.OK
    out, err = capfd.readouterr()
    assert {json.loads(line)["response"]["status_code"] for line in out.splitlines()} == {200}
    assert json.loads(err.splitlines()[-1])["ok"] == 3


def test_a_pipes_rows_go_to_stdout(started: list[EngineOptions], capfd: Any) -> None:
    os.mkfifo("pipe")
    rows = "".join(json.dumps(row) + "\n" for row in PROMPTS)
    feeding = threading.Thread(target=Path("pipe").write_text, args=(rows,))
    feeding.start()
    assert run(["batch", "pipe"]) == ExitCode.OK
    feeding.join()
    assert len(capfd.readouterr().out.splitlines()) == 3
    assert os.listdir() == ["pipe"]


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
    whole = launched_engine.settings

    def smaller(given: EngineOptions, folder: Path) -> Settings:
        changed = {"max_model_len": 100, "kv_blocks": 7, "page_size": 4, "dtype": "float16"}
        return msgspec.structs.replace(whole(given, folder), **changed)

    rows = write_rows(*PROMPTS)
    assert run(["batch", rows, "--limit", "1"]) == ExitCode.OK
    monkeypatch.setattr(launched_engine, "settings", smaller)
    assert run(["batch", rows]) == ExitCode.OK, capsys.readouterr().err
    assert len(answers()) == len(PROMPTS)


def test_the_seed_of_dummy_weights_counts_as_one(started: list[EngineOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_rows(*PROMPTS)
    assert run(["batch", rows, "--load-format", "dummy", "--seed", "1"]) == ExitCode.OK
    sidecar = json.loads(Path("in.out.jsonl.run.json").read_text())
    assert (sidecar["model"]["weights_seed"], sidecar["settings"]["seed"]) == (1, 1)
