"""Batch runs over a fake engine: every kind of row, order, limits, interruption, and the engine's death."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai.types
import openai.types.chat
import pytest

from corellm.batch.check import InputCheck
from corellm.batch.fingerprint import Fingerprint
from corellm.batch.journal import open_journal
from corellm.batch.lines import Source
from corellm.batch.options import BatchOptions
from corellm.batch.progress import Event, RowEnded, SharedId, Stopping, Summary
from corellm.batch.runner import MAX_UNWRITTEN, BatchRunner
from corellm.comms.messages import Progress
from corellm.errors import BatchError, EngineDeadError, InvalidRequestError, NumericalError, OptionError
from corellm.openai_api.prompts import ModelLimits
from tests.support.fake_text_engine import FakeTextEngine

Output = list[dict[str, Any]]


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{index}", "custom_id": f"c{index}"} for index in range(count)]


class Bench:
    """One input and one output in a folder, run as often as a test likes."""

    def __init__(self, folder: Path, rows: list[Any]) -> None:
        self.source = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.events: list[Event] = []
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        self.source.write_bytes(b"".join(line + b"\n" for line in lines))

    def run(
        self,
        engine: FakeTextEngine,
        *,
        meanwhile: Callable[[BatchRunner], Any] | None = None,
        restart: bool = False,
        retry_errors: bool = False,
        **options: Any,
    ) -> Summary:
        return asyncio.run(self._run(engine, BatchOptions(**options), meanwhile, restart, retry_errors))

    async def _run(
        self,
        engine: FakeTextEngine,
        options: BatchOptions,
        meanwhile: Callable[[BatchRunner], Any] | None,
        restart: bool,
        retry_errors: bool,
    ) -> Summary:
        source = Source(str(self.source))
        survey = source.survey()
        assert survey is not None
        fingerprint = Fingerprint.of(survey, model={"model": "m"}, settings=options.settings())
        with open_journal(
            str(self.output), fingerprint, source=source.name, restart=restart, retry_errors=retry_errors
        ) as journal:
            runner = BatchRunner(engine, source, journal, options, self.events.append, total=survey.rows)
            helper = asyncio.create_task(meanwhile(runner)) if meanwhile else None
            try:
                return await runner.run()
            finally:
                assert runner.snapshot().in_flight == 0
                assert engine.running == 0
                if helper is not None:
                    await helper

    def rows(self) -> Output:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]

    def by_line(self) -> dict[int, dict[str, Any]]:
        found = {int(row["id"].split("_")[2]): row for row in self.rows()}
        assert len(found) == len(self.rows())
        return found


def error_of(row: dict[str, Any]) -> dict[str, Any]:
    return row["response"]["body"]["error"]  # type: ignore[no-any-return]


def test_every_kind_of_row_gets_its_one_line(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    bench = Bench(
        tmp_path,
        [
            {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-4o", **chat}},
            {"prompt": "p", "max_tokens": 2},
            b"{not json",
            {"custom_id": "bad-value", "prompt": "p", "temperature": 9},
            {"custom_id": "a", "prompt": "again"},
            {"custom_id": "long", "prompt": "x" * 200},
            {"custom_id": "wide", "prompt": "x" * 100, "max_tokens": 101},
            {"custom_id": "role", "messages": [{"role": "wizard", "content": "hi"}]},
            {"custom_id": "nan", "prompt": "nan"},
            {"custom_id": "ids", "prompt": [104, 256]},
            {"custom_id": "bias", "prompt": "p", "logit_bias": {"256": 1}},
            {"custom_id": "empty", "prompt": ""},
            {"custom_id": "stream", "prompt": "p", "stream": True},
        ],
    )
    engine = FakeTextEngine(failure=lambda prompt: NumericalError("NaN") if prompt == "nan" else None)
    summary = bench.run(engine)
    rows = bench.by_line()
    assert (summary.ok, summary.failed, summary.skipped) == (2, 11, 0)
    assert rows.keys() == set(range(1, 14))

    body = rows[1]["response"]["body"]
    openai.types.chat.ChatCompletion.model_validate(body, strict=True)
    assert (rows[1]["custom_id"], rows[1]["response"]["status_code"], body["model"]) == ("a", 200, "fake-model")
    assert body["choices"][0]["message"]["content"] == "<user:hi|assistant:>"
    body = rows[2]["response"]["body"]
    openai.types.Completion.model_validate(body, strict=True)
    assert (rows[2]["custom_id"], body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (
        "row-2",
        "<p",
        "length",
    )
    for line, code in ((3, "row_invalid"), (5, "duplicate_custom_id")):
        assert (rows[line]["response"], rows[line]["error"]["code"], rows[line]["error"]["line"]) == (None, code, line)
    expected = {
        4: (400, "temperature", "temperature is 9"),
        6: (400, "prompt", "the prompt has 200 tokens"),
        7: (400, "max_tokens", "201 together; a request may have 200"),
        8: (400, "messages[0].role", "role is unknown"),
        9: (500, None, "NaN"),
        10: (400, "prompt", "token 256; the model's ids end at 255"),
        11: (400, "logit_bias", "token 256"),
        12: (400, "prompt", "no tokens"),
        13: (400, "stream", "stream is true"),
    }
    for line, (status, param, message) in expected.items():
        assert rows[line]["error"] is None
        assert rows[line]["response"]["status_code"] == status
        assert error_of(rows[line])["param"] == param
        assert error_of(rows[line])["message"].startswith(f"line {line}: ")
        assert message in error_of(rows[line])["message"]
    ended = [event for event in bench.events if isinstance(event, RowEnded)]
    assert {event.line for event in ended if event.error is None} == {1, 2}


def test_a_prompt_that_just_fits_runs(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 199, "max_tokens": 1}, {"messages": [{"role": "user", "content": "x" * 183}]}]
    assert Bench(tmp_path, rows).run(FakeTextEngine()).ok == 2


def test_several_choices_and_prompts_are_one_row(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [{"prompt": ["ab", "cdef"], "n": 2, "seed": 5, "cache_salt": "s", "logprobs": 1}])
    engine = FakeTextEngine()
    summary = bench.run(engine)
    (row,) = bench.rows()
    assert [choice["text"] for choice in row["response"]["body"]["choices"]] == ["<ab>", "<ab>", "<cdef>", "<cdef>"]
    assert row["response"]["body"]["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 20,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (6, 3, 20)
    assert [(text, params.seed, priority, salt) for text, params, priority, salt in engine.calls] == [
        ("ab", 5, 1, "s"),
        ("ab", 6, 1, "s"),
        ("cdef", 5, 1, "s"),
        ("cdef", 6, 1, "s"),
    ]


def test_a_prompt_alone_is_a_row_without_an_answer(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [{"prompt": ["one", "two"], "echo": True, "max_tokens": 0, "logprobs": 1}])
    summary = bench.run(FakeTextEngine())
    body = bench.rows()[0]["response"]["body"]
    assert [(choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [
        ("one", "length"), ("two", "length"),
    ]  # fmt: skip
    assert (body["usage"]["completion_tokens"], summary.prompt_tokens, summary.output_tokens) == (0, 6, 0)


def test_one_failed_choice_fails_its_row_once_the_others_are_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [{"prompt": ["slow", "bad"]}, {"prompt": "good"}])
    engine = FakeTextEngine(
        delay=lambda prompt: 0.05 if prompt == "slow" else 0.0,
        failure=lambda prompt: NumericalError("NaN") if prompt == "bad" else None,
    )
    bench.run(engine)
    assert [bench.by_line()[line]["response"]["status_code"] for line in (1, 2)] == [500, 200]
    assert engine.cancelled == 0


def test_defaults_apply_and_a_bad_one_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [{"prompt": "a"}, {"prompt": "b", "max_tokens": 7}])
    engine = FakeTextEngine()
    bench.run(engine, defaults={"max_tokens": 3, "temperature": 0.0, "top_p": None})
    assert {text: (params.max_tokens, params.temperature) for text, params, _, _ in engine.calls} == {
        "a": (3, 0.0),
        "b": (7, 0.0),
    }
    with pytest.raises(InvalidRequestError, match="temperature is 5"):
        bench.run(engine, restart=True, defaults={"temperature": 5})


def scattered(prompt: str) -> float:
    return (hash(prompt) % 5) / 500


def test_rows_in_flight_are_bounded_and_keep_the_engine_full(tmp_path: Path) -> None:
    engine = FakeTextEngine(max_seqs=3, delay=scattered)
    bench = Bench(tmp_path, [*prompts(40), {"prompt": ["x"] * 20}])
    bench.run(engine)
    assert engine.peak == 6
    engine = FakeTextEngine(delay=scattered)
    bench.run(engine, restart=True, max_in_flight=2)
    assert engine.peak == 2


def test_completion_order_is_the_default(tmp_path: Path) -> None:
    bench = Bench(tmp_path, prompts(4))
    bench.run(FakeTextEngine(delay=lambda prompt: 0.05 if prompt == "p0" else 0.0))
    assert [row["custom_id"] for row in bench.rows()] == ["c1", "c2", "c3", "c0"]


def test_input_order_holds_back_within_its_window(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [*prompts(20), b"bad", *({"prompt": f"q{index}"} for index in range(20))])
    engine = FakeTextEngine(delay=lambda prompt: 0.1 if prompt == "p0" else 0.0)
    started: list[int] = []

    async def count(runner: BatchRunner) -> None:
        await asyncio.sleep(0.05)
        started.append(len(engine.calls))

    bench.run(engine, order="input", max_in_flight=2, meanwhile=count)
    assert started == [16]  # HELD_BACK times 2: the first row blocks them all
    assert [int(row["id"].split("_")[2]) for row in bench.rows()] == list(range(1, 42))


def test_limit_runs_the_first_rows_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, prompts(6))
    totals: list[int | None] = []

    async def look(runner: BatchRunner) -> None:
        totals.append(runner.snapshot().total)

    assert bench.run(FakeTextEngine(), limit=2, meanwhile=look).ok == 2
    assert totals == [2]
    assert bench.by_line().keys() == {1, 2}
    summary = bench.run(FakeTextEngine())
    assert (summary.ok, summary.skipped) == (4, 2)
    assert bench.by_line().keys() == set(range(1, 7))


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="--order is 'random'"):
        BatchOptions(order="random")
    with pytest.raises(OptionError, match="--limit is 0"):
        BatchOptions(limit=0)


def test_retry_errors_runs_failed_rows_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [*prompts(5), b"bad"])
    summary = bench.run(FakeTextEngine(failure=lambda text: NumericalError("NaN") if text in ("p1", "p3") else None))
    assert (summary.ok, summary.failed) == (3, 3)
    engine = FakeTextEngine()
    summary = bench.run(engine, retry_errors=True)
    assert (summary.ok, summary.failed, summary.skipped) == (2, 1, 3)
    assert sorted(text for text, *_ in engine.calls) == ["p1", "p3"]
    assert [bench.by_line()[line]["response"] is not None for line in range(1, 7)] == [True] * 5 + [False]


def test_a_limit_holds_for_retried_rows_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [*prompts(6), b"bad"])
    bench.run(FakeTextEngine(failure=lambda text: NumericalError("NaN") if text in ("p1", "p4") else None))
    engine = FakeTextEngine()
    summary = bench.run(engine, retry_errors=True, limit=3)
    assert (summary.ok, summary.skipped, summary.skipped_failed) == (1, 2, 0)
    assert [text for text, *_ in engine.calls] == ["p1"]
    assert bench.by_line().keys() == set(range(1, 8))
    failed = [
        line for line, row in bench.by_line().items() if not row["response"] or row["response"]["status_code"] > 200
    ]
    assert sorted(failed) == [5, 7]


def check(bench: Bench, engine: FakeTextEngine, **options: Any) -> InputCheck:
    limits = ModelLimits(200, 256)
    return InputCheck(engine, limits, Source(str(bench.source)), BatchOptions(**options), bench.events.append)


def test_a_strict_check_stops_at_the_first_bad_row(tmp_path: Path) -> None:
    engine = FakeTextEngine()
    reports: list[Progress] = []
    bad = check(Bench(tmp_path, [*prompts(300), {"prompt": "x", "n": 0}, b"bad"]), engine, strict=True)
    with pytest.raises(BatchError, match="--strict: line 301: n is 0"):
        bad.run(reports.append, 302)
    assert [(progress.done, progress.total) for progress in reports] == [(0, 302), (256, 302)]
    assert (bad.summary("batch_failed").ok, bad.summary("batch_failed").failed_with) == (300, "batch_failed")
    bench = Bench(tmp_path, [*prompts(3), prompts(1)[0]])
    with pytest.raises(BatchError, match='line 4: custom_id "c0"'):
        check(bench, engine, strict=True).run(reports.append)
    good = check(Bench(tmp_path, prompts(3)), engine, strict=True)
    good.run(reports.append)
    assert good.summary().ok == 3
    assert engine.calls == []


def test_a_strict_run_stops_at_a_row_that_only_the_engine_finds_too_long(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [{"prompt": "fits"}, {"prompt": "x" * 200}])
    with pytest.raises(BatchError, match="--strict: line 2: the prompt has 200 tokens"):
        bench.run(FakeTextEngine(), strict=True)
    assert bench.by_line().keys() <= {1}


def test_a_check_counts_tokens_and_generates_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [{"prompt": "abc"}, b"bad", {"prompt": ["de", "f"]}, {"prompt": "x", "n": 0}])
    engine = FakeTextEngine()
    checked = check(bench, engine)
    checked.run(lambda progress: None)
    summary = checked.summary()
    assert (summary.ok, summary.failed, summary.prompt_tokens, summary.output_tokens) == (2, 2, 6, 0)
    assert [event.line for event in bench.events if isinstance(event, RowEnded) and event.error] == [2, 4]
    assert engine.calls == []
    assert os.listdir(tmp_path) == ["in.jsonl"]
    limited = check(bench, engine, limit=1)
    limited.run(lambda progress: None)
    assert (limited.summary().ok, limited.summary().failed) == (1, 0)


def test_a_made_id_that_a_row_gives_is_said(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [{"prompt": "a"}, {"custom_id": "row-1", "prompt": "b"}, {"prompt": "c"}])
    assert bench.run(FakeTextEngine()).ok == 3
    check(bench, FakeTextEngine()).run(lambda progress: None)
    assert [event for event in bench.events if isinstance(event, SharedId)] == [SharedId(2, "row-1")] * 2


def test_the_answers_of_one_row_are_never_more_tasks_than_seats(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [{"prompt": ["a"] * 512, "n": 4}])
    most = 0

    def tasks(prompt: str) -> float:
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))
        return 0.0

    assert bench.run(FakeTextEngine(delay=tasks), max_in_flight=3).ok == 1
    assert most < 20
    assert len(bench.rows()[0]["response"]["body"]["choices"]) == 2048


def test_a_row_stopped_while_it_waits_for_seats_leaves_no_task(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [{"prompt": ["a"] * 50}])
    engine = FakeTextEngine(delay=lambda prompt: 30.0)

    async def stop(runner: BatchRunner) -> None:
        await asyncio.sleep(0.02)
        runner.stop_now()

    assert bench.run(engine, max_in_flight=2, meanwhile=stop).interrupted
    assert engine.cancelled == 2


def test_a_stop_lets_rows_in_flight_finish(tmp_path: Path) -> None:
    bench = Bench(tmp_path, prompts(20))
    engine = FakeTextEngine(delay=lambda prompt: 0.05)

    async def stop(runner: BatchRunner) -> None:
        await asyncio.sleep(0.02)
        runner.request_stop()
        runner.request_stop()
        assert runner.snapshot().stopping

    summary = bench.run(engine, max_in_flight=3, meanwhile=stop)
    assert (summary.interrupted, summary.ok, engine.cancelled) == (True, 3, 0)
    assert [event for event in bench.events if isinstance(event, Stopping)] == [Stopping(3, 5.0)]
    assert len(bench.rows()) == 3
    summary = bench.run(FakeTextEngine())
    assert (summary.interrupted, summary.ok, summary.skipped) == (False, 17, 3)
    assert len(bench.by_line()) == 20


def test_rows_that_outlast_the_grace_are_cancelled_and_run_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, prompts(4))
    engine = FakeTextEngine(delay=lambda prompt: 30.0 if prompt == "p1" else 0.0)

    async def stop(runner: BatchRunner) -> None:
        await asyncio.sleep(0.02)
        runner.request_stop()

    summary = bench.run(engine, grace_s=0.05, meanwhile=stop)
    assert (summary.interrupted, summary.ok, engine.cancelled) == (True, 3, 1)
    assert bench.by_line().keys() == {1, 3, 4}
    bench.run(FakeTextEngine())
    assert bench.by_line().keys() == {1, 2, 3, 4}


def test_a_second_stop_is_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, prompts(4))
    engine = FakeTextEngine(delay=lambda prompt: 30.0)

    async def stop(runner: BatchRunner) -> None:
        await asyncio.sleep(0.02)
        runner.request_stop()
        await asyncio.sleep(0.02)
        runner.stop_now()

    summary = bench.run(engine, meanwhile=stop)
    assert (summary.interrupted, summary.ok, engine.cancelled) == (True, 0, 4)
    assert bench.rows() == []


def test_a_dead_engine_ends_the_run_and_its_rows_run_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, prompts(10))
    engine = FakeTextEngine(
        delay=lambda prompt: 0.02 if prompt == "p3" else 0.0 if prompt < "p3" else 30.0,
        failure=lambda prompt: EngineDeadError("killed") if prompt == "p3" else None,
    )
    with pytest.raises(EngineDeadError, match="killed"):
        bench.run(engine)
    assert bench.by_line().keys() == {1, 2, 3}
    assert bench.run(FakeTextEngine()).ok == 7
    assert bench.by_line().keys() == set(range(1, 11))


def test_a_request_that_the_engine_drops_is_an_error_of_the_run(tmp_path: Path) -> None:
    class Dropping(FakeTextEngine):
        async def complete(self, *_: Any, **__: Any) -> Any:
            raise asyncio.CancelledError

    with pytest.raises(EngineDeadError, match="dropped a request"):
        Bench(tmp_path, prompts(2)).run(Dropping())


def test_a_bug_in_the_engine_surfaces(tmp_path: Path) -> None:
    class Broken(FakeTextEngine):
        async def complete(self, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Bench(tmp_path, prompts(2)).run(Broken())


def test_a_failing_output_ends_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, prompts(10))
    bench.output = Path("/dev/full")
    engine = FakeTextEngine(delay=scattered)
    with pytest.raises(BatchError, match="No space left"):
        bench.run(engine)


def test_an_input_that_breaks_midway_ends_the_run_with_its_rows_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path, prompts(5))
    bench.run(FakeTextEngine(), limit=4)
    lines = bench.source.read_bytes().splitlines(keepends=True)
    source = Source(str(bench.source))
    fingerprint = Fingerprint.of(None, model={"model": "m"}, settings={})

    def resume(data: bytes) -> None:
        async def go() -> None:
            with open_journal(str(bench.output), fingerprint, source=source.name) as journal:
                await BatchRunner(FakeTextEngine(), source, journal, BatchOptions(), bench.events.append).run()

        bench.source.write_bytes(data)
        asyncio.run(go())

    # As if the input had been a pipe: only the rows' own checksums tell.
    sidecar = tmp_path / "out.jsonl.run.json"
    sidecar.write_bytes(json.dumps({**json.loads(sidecar.read_bytes()), **fingerprint_fields(fingerprint)}).encode())
    with pytest.raises(BatchError, match=r"line 2 of .* has changed"):
        resume(lines[0] + b'{"prompt": "other"}\n' + b"".join(lines[2:]))
    with pytest.raises(BatchError, match="ends before 2 of the rows"):
        resume(b"".join(lines[:2]))
    resume(b"".join(lines))
    assert len(bench.by_line()) == 5


def fingerprint_fields(fingerprint: Fingerprint) -> dict[str, Any]:
    return {name: getattr(fingerprint, name) for name in fingerprint.__struct_fields__}


IDLE_STDIN = """
import asyncio, signal, sys
from corellm.batch.fingerprint import Fingerprint
from corellm.batch.journal import open_journal
from corellm.batch.lines import Source
from corellm.batch.options import BatchOptions
from corellm.batch.runner import BatchRunner
from tests.support.fake_text_engine import FakeTextEngine

async def main() -> None:
    fingerprint = Fingerprint.of(None, model={"model": "m"}, settings={})
    with open_journal("-", fingerprint, source="-") as journal:
        runner = BatchRunner(FakeTextEngine(), Source("-"), journal, BatchOptions(), lambda event: None)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, runner.request_stop)
        print((await runner.run()).interrupted, file=sys.stderr)

asyncio.run(main())
"""


def test_rows_of_a_pipe_run_as_they_come_and_a_stop_does_not_wait_for_more() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", IDLE_STDIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdin is not None
        assert isinstance(process.stdout, io.BufferedReader)
        process.stdin.write(b'{"prompt": "first"}\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["response"]["body"]["choices"][0]["text"] == "<first>"
        process.send_signal(signal.SIGINT)
        # Standard input stays open.
        assert process.wait(timeout=10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b"True\n"
    finally:
        process.kill()
        process.communicate()


async def _run_into(pipe: Path, rows: list[Any], folder: Path, meanwhile: Callable[[BatchRunner], Any]) -> Summary:
    """A run whose output is a pipe, with `meanwhile` beside it."""
    bench = Bench(folder, rows)
    source = Source(str(bench.source))
    fingerprint = Fingerprint.of(None, model={}, settings={})
    with open_journal(str(pipe), fingerprint, source=source.name) as journal:
        runner = BatchRunner(FakeTextEngine(), source, journal, BatchOptions(grace_s=0.1), bench.events.append)
        helper = asyncio.create_task(meanwhile(runner))
        summary = await runner.run()
        await helper
        return summary


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A named pipe and its reading end."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path, reader
    os.close(reader)


def test_a_pipe_that_nobody_reads_blocks_neither_the_loop_nor_a_stop(tmp_path: Path, pipe: tuple[Path, int]) -> None:
    began = time.monotonic()
    beats = 0

    async def stop(runner: BatchRunner) -> None:
        nonlocal beats
        while beats < 20:
            await asyncio.sleep(0.02)
            beats += 1
        assert runner.snapshot().ok < 1500  # what the pipe holds, and no more
        runner.request_stop()  # the grace alone must be enough

    rows = [{"prompt": "x" * 190, "max_tokens": 1} for _ in range(3000)]
    summary = asyncio.run(_run_into(pipe[0], rows, tmp_path, stop))
    assert beats == 20
    assert summary.interrupted
    assert 0 < summary.ok < 1500
    assert time.monotonic() - began < 5


def test_admission_waits_for_the_reader_of_a_pipe(tmp_path: Path, pipe: tuple[Path, int]) -> None:
    admitted: list[int] = []
    text = b""

    async def read_late(runner: BatchRunner) -> None:
        nonlocal text
        await asyncio.sleep(0.3)
        admitted.append(runner._unwritten.qsize())
        while text.count(b"\n") < 1500:
            await asyncio.sleep(0.001)
            with suppress(BlockingIOError):
                text += os.read(pipe[1], 1 << 16)

    rows = [{"prompt": "p", "max_tokens": 1} for _ in range(1500)]
    summary = asyncio.run(_run_into(pipe[0], rows, tmp_path, read_late))
    assert summary.ok == 1500
    assert MAX_UNWRITTEN <= admitted[0] <= MAX_UNWRITTEN + 16
    assert sorted(int(json.loads(row)["id"].split("_")[2]) for row in text.splitlines()) == list(range(1, 1501))


def test_a_reader_that_leaves_ends_the_run(tmp_path: Path, pipe: tuple[Path, int]) -> None:
    async def leave(runner: BatchRunner) -> None:
        os.dup2(os.open(os.devnull, os.O_RDONLY), pipe[1])

    with pytest.raises(BrokenPipeError):
        asyncio.run(_run_into(pipe[0], [{"prompt": "p"}] * 3000, tmp_path, leave))
