"""`corellm batch` as a process, on a tiny model: killed at random, interrupted, starved of disk, given bad rows.

`CORELLM_KILLS=100` makes the first test as long as the promise: 100 SIGKILLs over one run of 2,000 rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.processes import engine_processes, pid_of, wait_until_gone
from tests.support.serve_process import serving
from tests.support.tiny_llama import make_tiny_llama

KILLS = int(os.environ.get("CORELLM_KILLS", "6"))
ROWS = 2000
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(path, max_positions=512)
    write_byte_tokenizer(path)
    return path


class Batch:
    """The command in a folder of its own, with a run folder of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.run_root = folder / "corellm"
        self.input, self.output = folder / "in.jsonl", folder / "in.out.jsonl"
        self._environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "NO_COLOR": "1"}
        self._words = [str(Path(sys.executable).with_name("corellm")), "batch", str(self.input), "--model", str(model)]
        self._words += ["--device", "cpu", "--max-tokens", str(MAX_TOKENS), "--temperature", "0"]

    def write(self, rows: Sequence[Any]) -> None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        self.input.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    @contextlib.contextmanager
    def start(self, *options: str, prefix: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [*prefix, *self._words, *options],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def run(self, *options: str, prefix: Sequence[str] = ()) -> tuple[int, str, str]:
        with self.start(*options, prefix=prefix) as process:
            out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]

    def written(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def wait_for_rows(self, count: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 60
        while self.written() < count:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, f"{self.written()} rows after 60 s"
            time.sleep(0.01)


@pytest.fixture
def batch(tmp_path: Path, tiny: Path) -> Batch:
    return Batch(tmp_path, tiny)


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"row {number} " * (1 + number % 7)} for number in range(count)]


def texts(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}


def test_killed_at_random_moments_it_ends_with_one_row_each(batch: Batch, tmp_path: Path, tiny: Path) -> None:
    # More kills need rows that take longer, and that do not all end at once.
    rows = [{**row, "max_tokens": 20 + number * 37 % (3 * KILLS)} for number, row in enumerate(prompts(ROWS))]
    batch.write(rows)
    rng = random.Random(0)
    kills, moments = 0, []
    while kills < KILLS:
        with batch.start() as process:
            # Start-up takes seconds; most kills should come while rows are written.
            time.sleep(rng.uniform(0.1, 3.0))
            if rng.random() < 0.8 and batch.written() < ROWS - 100:
                more = 1 + rng.randrange(ROWS // KILLS // 2 + 2)
                batch.wait_for_rows(min(batch.written() + more, ROWS - 50), process)
            if process.poll() is None:
                process.kill()
                kills += 1
                moments.append(batch.written())
    code, _, err = batch.run()
    assert code == 0, err
    print(f"{kills} kills, rows written at each: {moments}")
    assert sorted(texts(batch.rows())) == sorted(f"row-{number + 1}" for number in range(ROWS))
    assert len(batch.rows()) == ROWS
    wait_until_gone(batch.run_root, 5)

    (tmp_path / "unbroken").mkdir()
    unbroken = Batch(tmp_path / "unbroken", tiny)
    unbroken.write(rows[:200])
    assert unbroken.run()[0] == 0
    broken = texts(batch.rows())
    assert {name: broken[name] for name in texts(unbroken.rows())} == texts(unbroken.rows())


@pytest.mark.parametrize("module", ["corellm.engine", "corellm.worker"])
def test_a_killed_engine_is_said_and_the_run_resumes(batch: Batch, module: str) -> None:
    batch.write(prompts(ROWS))
    with batch.start() as process:
        batch.wait_for_rows(20, process)
        os.kill(pid_of(batch.run_root, module), signal.SIGKILL)
        began = time.monotonic()
        _, err = process.communicate(timeout=30)
        assert time.monotonic() - began < 5
    assert process.returncode == 1
    assert "SIGKILL" in err
    assert "run the same command again" in err
    assert "Traceback" not in err
    assert not engine_processes(batch.run_root)
    done = batch.written()
    assert 20 <= done < ROWS
    code, out, err = batch.run("--json-summary")
    assert code == 0, err
    assert json.loads(out)["skipped"] == done
    assert len(texts(batch.rows())) == len(batch.rows()) == ROWS


def test_a_server_that_comes_and_goes_changes_nothing(batch: Batch, tiny: Path) -> None:
    """The same command, on an engine of its own, on a server's with a shorter context, on its own again."""
    batch.write([*prompts(600), {"prompt": "x" * 300}])  # which fits an engine of our own, and comes last
    with batch.start("--new-engine") as process:
        batch.wait_for_rows(20, process)
    with serving(batch.folder, str(tiny), "--max-model-len", "256") as server:
        with batch.start() as process:
            batch.wait_for_rows(batch.written() + 20, process)
            os.kill(pid_of(batch.run_root, "corellm.engine"), signal.SIGKILL)
            _, err = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "run the same command again" in err
        server.wait(20)
    code, out, err = batch.run("--json-summary")
    assert code == 0, err
    assert json.loads(out)["skipped"] >= 40
    assert len(texts(batch.rows())) == len(batch.rows()) == 601


def test_one_model_has_many_names(batch: Batch, tiny: Path) -> None:
    batch.write(prompts(3))
    assert batch.run()[0] == 0
    (batch.folder / "link").symlink_to(tiny)
    for name in (os.path.relpath(tiny), f"{tiny}/../{tiny.name}", str(batch.folder / "link")):
        code, out, err = batch.run("--model", name, "--json-summary")
        assert code == 0, err
        assert json.loads(out)["skipped"] == 3


def test_ctrl_c_once_finishes_what_runs(batch: Batch) -> None:
    batch.write(prompts(ROWS))
    with batch.start() as process:
        batch.wait_for_rows(20, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert 20 <= len(texts(batch.rows())) < ROWS
    assert batch.run()[0] == 0
    assert len(texts(batch.rows())) == len(batch.rows()) == ROWS


def test_ctrl_c_twice_stops_now(batch: Batch) -> None:
    batch.write(prompts(ROWS))
    with batch.start("--max-tokens", "400") as process:
        batch.wait_for_rows(1, process)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert time.monotonic() - began < 8
    assert "Traceback" not in err
    wait_until_gone(batch.run_root, 5)


def test_ctrl_c_while_it_starts_leaves_at_once(batch: Batch) -> None:
    batch.write(prompts(5))
    for module in ("corellm.engine", "corellm.worker"):
        with batch.start() as process:
            deadline = time.monotonic() + 60
            while module not in engine_processes(batch.run_root).values():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
            assert time.monotonic() - began < 8  # an orderly end may take 15
        assert process.returncode == 130, err
        assert err.splitlines()[-1] == "interrupted before the first row; nothing was generated"
        wait_until_gone(batch.run_root, 2)
        assert not list(batch.run_root.iterdir())


def test_a_full_disk_keeps_finished_rows_and_resumes(batch: Batch) -> None:
    batch.write(prompts(300))
    code, _, err = batch.run(prefix=["prlimit", f"--fsize={60_000}"])
    assert code == 1, err
    assert re.search(r"disk|full|space|too large", err, re.IGNORECASE)
    assert "Traceback" not in err
    finished = batch.rows()
    assert 0 < len(finished) < 300
    assert batch.run()[0] == 0
    assert len(texts(batch.rows())) == len(batch.rows()) == 300


BAD_ROWS: list[tuple[Any, str]] = [
    ("not json", "row_invalid"),
    ("[1, 2]", "row_invalid"),
    ('{"custom_id": "a", "method": "POST", "url": "/v1/nowhere", "body": {}}', "row_invalid"),
    ({"custom_id": "m", "method": "GET", "url": "/v1/completions", "body": {"prompt": "x"}}, "row_invalid"),
    ({"custom_id": "twin", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}, ""),
    ({"custom_id": "twin", "method": "POST", "url": "/v1/completions", "body": {"prompt": "y"}}, "duplicate_custom_id"),
    ({"prompt": "x", "temperature": 9}, "400"),
    ({"prompt": "x", "nonsense": 1}, "400"),
    ({"prompt": "x" * 600}, "400"),
    ({"prompt": [1, 2, 99999]}, "400"),
    ({"prompt": ""}, "400"),
    ({"messages": "hello"}, "400"),
]


def test_every_kind_of_bad_row_is_one_error_row_and_the_rest_runs(batch: Batch) -> None:
    good = prompts(3)
    batch.write([*good[:2], *(row for row, _ in BAD_ROWS), good[2]])
    code, _, err = batch.run("--order", "input")
    assert code == 3, err
    rows = batch.rows()
    assert len(rows) == len(BAD_ROWS) + 3
    for number, (row, (_, expected)) in enumerate(zip(rows[2:-1], BAD_ROWS, strict=True), start=3):
        if expected == "":
            assert row["response"]["status_code"] == 200
        elif expected == "400":
            assert row["response"]["status_code"] == 400, row
            assert row["response"]["body"]["error"]["message"], row
        else:
            assert row["error"]["code"] == expected, row
            assert str(number) in json.dumps(row["error"]), row
    assert all(row["response"]["status_code"] == 200 for row in (*rows[:2], rows[-1]))


def test_strict_stops_before_anything_is_generated(batch: Batch) -> None:
    batch.write([*prompts(2), "not json"])
    code, _, err = batch.run("--strict")
    assert code in (1, 3)
    assert "line 3" in err
    assert not batch.written()


def test_a_changed_setting_is_refused_by_name(batch: Batch) -> None:
    batch.write(prompts(3))
    assert batch.run()[0] == 0
    before = batch.output.read_bytes()
    for options, name in ((["--top-p", "0.5"], "top_p"), (["--dtype", "bfloat16"], "dtype")):
        code, _, err = batch.run(*options)
        assert code in (1, 2), err
        assert name in err
        assert "--restart" in err
    batch.write(prompts(4))
    code, _, err = batch.run()
    assert code in (1, 2)
    assert "input" in err
    assert batch.output.read_bytes() == before
    assert batch.run("--restart")[0] == 0
    assert len(batch.rows()) == 4


def test_a_second_run_on_the_same_output_is_refused(batch: Batch) -> None:
    batch.write(prompts(ROWS))
    with batch.start() as process:
        batch.wait_for_rows(1, process)
        code, _, err = batch.run()
        assert code == 1
        assert str(process.pid) in err
        assert process.poll() is None


def test_rows_flow_through_a_pipe(batch: Batch) -> None:
    batch.write(prompts(5))
    line = " ".join(batch._words).replace(str(batch.input), "-")
    done = subprocess.run(
        ["sh", "-c", f"{line} < {batch.input}"], env=batch._environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len([json.loads(row) for row in done.stdout.splitlines()]) == 5
