"""A run that is cut short anywhere and started again ends with the output of a run that was not."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from corellm.batch.options import ORDERS
from corellm.batch.runner import BatchRunner
from corellm.errors import BatchError, CoreLLMError, EngineDeadError, NumericalError
from tests.support.fake_text_engine import FakeTextEngine
from tests.unit.test_batch_runner import Bench

ROWS: list[Any] = [
    {"custom_id": "é", "prompt": "p0"},
    {"messages": [{"role": "user", "content": "hi\n"}], "n": 2},
    b"",
    b"{bad",
    {"prompt": "nan"},
    {"prompt": "x", "top_p": 7},
    {"custom_id": "é", "prompt": "again"},
    *({"prompt": f"q{index}", "max_tokens": 3} for index in range(12)),
]


def engine() -> FakeTextEngine:
    return FakeTextEngine(failure=lambda prompt: NumericalError("NaN") if prompt == "nan" else None)


def without_random_ids(row: dict[str, Any]) -> str:
    if row["response"] is not None:
        row["response"]["request_id"] = "r"
        if "created" in row["response"]["body"]:
            row["response"]["body"].update(id="i", created=0)
    return json.dumps(row, sort_keys=True)


def outcome(bench: Bench) -> list[str]:
    return sorted(without_random_ids(row) for row in bench.rows())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    bench = Bench(tmp_path_factory.mktemp("whole"), ROWS)
    bench.run(engine())
    assert len(bench.rows()) == len(ROWS) - 1
    return outcome(bench)


def test_an_output_cut_at_any_byte_of_its_tail_is_completed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [ROWS[0], b"{bad"])
    bench.run(engine())
    whole, expected = bench.output.read_bytes(), outcome(bench)
    for size in range(len(whole.splitlines(keepends=True)[0]), len(whole) + 1):
        bench.output.write_bytes(whole[:size])
        bench.run(engine())
        assert outcome(bench) == expected, size


@pytest.mark.parametrize("seed", range(60))
def test_any_sequence_of_crashes_ends_with_one_row_for_each(tmp_path: Path, expected: list[str], seed: int) -> None:
    draw = random.Random(seed)
    order = draw.choice(ORDERS)
    bench = Bench(tmp_path, ROWS)
    for _ in range(draw.randrange(5)):
        crash(bench, draw, order)
    summary = bench.run(engine(), order=order, max_in_flight=3)
    assert outcome(bench) == expected
    assert summary.ok + summary.failed + summary.skipped == len(expected)
    if order == "input":
        lines = [int(row["id"].split("_")[2]) for row in bench.rows()]
        assert lines == sorted(lines)
    assert bench.run(engine(), order=order).skipped == len(expected)


@pytest.mark.parametrize("seed", range(20))
def test_crashes_of_a_retry_lose_no_row(tmp_path: Path, expected: list[str], seed: int) -> None:
    draw = random.Random(seed)
    bench = Bench(tmp_path, ROWS)
    failing = {f"q{index}" for index in range(12) if draw.random() < 0.6} | {"nan", "p0"}
    bench.run(FakeTextEngine(failure=lambda prompt: NumericalError("NaN") if prompt in failing else None))
    for _ in range(draw.randrange(1, 5)):
        interrupt(bench, draw, retry_errors=True, limit=draw.choice((None, 9)))
        lines = [int(row["id"].split("_")[2]) for row in bench.rows()]
        assert len(set(lines)) == len(expected)
    bench.run(engine(), retry_errors=True)
    assert outcome(bench) == expected


def crash(bench: Bench, draw: random.Random, order: str) -> None:
    """A run is interrupted; then the output is cut somewhere in what this run wrote."""
    before = bench.output.stat().st_size if bench.output.exists() else 0
    interrupt(bench, draw, order=order)
    size = bench.output.stat().st_size
    os.truncate(bench.output, draw.randint(min(before, size), size))


def interrupt(bench: Bench, draw: random.Random, **options: Any) -> None:
    """The engine dies or the user stops the run."""
    kind = draw.choice(("death", "stop", "stop now"))
    answers = draw.randrange(16)

    def failure(prompt: str) -> CoreLLMError | None:
        if kind == "death" and len(dying.calls) > answers:
            return EngineDeadError("dead")
        return NumericalError("NaN") if prompt == "nan" else None

    dying = FakeTextEngine(delay=lambda prompt: draw.choice((0.0, 0.0, 0.001)), failure=failure)

    async def stop(runner: BatchRunner) -> None:
        while len(dying.calls) < answers and runner.snapshot().done < (runner.snapshot().total or 0):  # noqa: ASYNC110 (stop between any two steps of the loop)
            await asyncio.sleep(0)
        if kind == "stop":
            runner.request_stop()
        elif kind == "stop now":
            runner.stop_now()

    with suppress(EngineDeadError):
        bench.run(dying, max_in_flight=3, meanwhile=stop, **options)


def test_a_changed_input_is_refused_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ROWS)
    bench.run(engine(), limit=3)
    whole = bench.output.read_bytes()
    bench.source.write_bytes(bench.source.read_bytes() + b'{"prompt": "more"}\n')
    with pytest.raises(BatchError, match=r"input_sha256 was .*; input_size was"):
        bench.run(engine())
    assert bench.output.read_bytes() == whole
    bench.run(engine(), restart=True)
    assert len(bench.rows()) == len(ROWS)


MANY = int(os.environ.get("CORELLM_ROWS", "250000"))
MANY_ROWS = """
import re, sys
from pathlib import Path
from corellm.batch.check import InputCheck
from corellm.openai_api.prompts import ModelLimits
from corellm.batch.lines import Source
from corellm.batch.options import BatchOptions
from tests.support.fake_text_engine import FakeTextEngine

source, rows = Source(sys.argv[1]), int(sys.argv[2])
assert source.survey().rows == rows + 1
check = InputCheck(FakeTextEngine(), ModelLimits(200, 256), source, BatchOptions(), lambda event: None)
check.run(lambda progress: None)
summary = check.summary()
assert (summary.ok, summary.failed) == (rows, 1), summary
# Not getrusage: its peak is inherited from the process that started this one.
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024)
"""


@pytest.mark.slow
def test_many_rows_are_validated_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with open(path, "wb") as file:
        for index in range(MANY):
            file.write(b'{"custom_id": "request-%d", "prompt": "Say %d."}\n' % (index, index))
        file.write(b'{"custom_id": "request-0", "prompt": "again"}\n')
    command = [sys.executable, "-c", MANY_ROWS, str(path), str(MANY)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    peak_mb = int(told.stdout)
    assert peak_mb < 200, f"{peak_mb} MB"
    print(f"peak {peak_mb} MB")
