"""The display of a batch run: what it says at which width, rates, errors, and the closing summary."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console
from rich.segment import Segment

from corellm.batch.progress import RowEnded, SharedId, Snapshot, Stopping, Summary
from corellm.comms.messages import KVStats, Stats
from corellm_tui import batch_progress, quantities
from corellm_tui.batch_progress import BatchDisplay, EventLines, RateMeter, summary_json, summary_lines

SNAPSHOT = Snapshot(
    total=10_000, ok=1200, failed=34, skipped=1266, skipped_failed=0, in_flight=64, prompt_tokens=5000,
    cached_tokens=100, output_tokens=2000, elapsed_s=10.0, stopping=False,
)  # fmt: skip
SUMMARY = Summary(
    ok=8, failed=1, skipped=3, prompt_tokens=1240, cached_tokens=64, output_tokens=330, wall_s=3.0, output="x.out.jsonl"
)


def stats(sequence: int, uptime: float, prompt: int, output: int) -> Stats:
    kv = KVStats(total=200, free=100, in_use=50, cached=50, shared=0, evictions=0, hit_tokens=0, query_tokens=0)
    return Stats(
        version=1, sequence=sequence, uptime_s=uptime, state="ready", model="demo", steps=1, running=1, waiting=0,
        kv=kv, prompt_tokens=prompt, output_tokens=output, finished=0, failed=0, aborted=0, preemptions=0,
        last_prefill_tokens=0, last_decode_tokens=0, last_step_s=0.0,
    )  # fmt: skip


def console(width: int = 80, *, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, height=24, force_terminal=terminal, color_system=None)


def printed(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def rendered(display: BatchDisplay, target: Console) -> list[str]:
    return ["".join(segment.text for segment in row) for row in target.render_lines(display.render(), pad=False)]


def test_a_plain_line_has_everything() -> None:
    target = console()
    BatchDisplay(target, lambda: SNAPSHOT, lambda: stats(1, 1.0, 0, 0)).paint()
    assert printed(target) == ("2,500/10,000 rows (25%), 34 errors, in 500 tok/s, out 200 tok/s, KV 25%, ETA 1:01\n")


def test_without_a_total_there_is_neither_share_nor_eta() -> None:
    target = console()
    BatchDisplay(target, lambda: replace(SNAPSHOT, total=None)).paint()
    assert printed(target) == "2,500 rows, 34 errors, in 500 tok/s, out 200 tok/s\n"


def test_an_empty_input_divides_by_nothing() -> None:
    target = console(terminal=True)
    empty = replace(SNAPSHOT, total=0, ok=0, failed=0, skipped=0, elapsed_s=0.0)
    assert rendered(BatchDisplay(target, lambda: empty), target)[0] == "0/0 rows"


def test_the_bar_is_as_full_as_the_run() -> None:
    target = console(terminal=True)
    line, _ = rendered(BatchDisplay(target, lambda: SNAPSHOT), target)
    bar = [segment for segment in target.render(BatchDisplay(target, lambda: SNAPSHOT).render()) if "━" in segment.text]
    assert (line.count("━"), line.count("╌")) == (10, 30)
    assert [segment.text for segment in bar] == ["━" * 10]


def test_before_half_a_second_there_is_neither_rate_nor_eta() -> None:
    target = console()
    early = replace(SNAPSHOT, elapsed_s=0.4)
    BatchDisplay(target, lambda: early).paint()
    assert printed(target) == "2,500/10,000 rows (25%), 34 errors\n"
    meter = RateMeter()
    meter.add(stats(1, 1.0, 0, 0))
    meter.add(stats(2, 1.3, 100, 100))
    assert meter.rates() is None
    meter.add(stats(3, 1.5, 100, 100))
    assert meter.rates() == (200.0, 200.0)


def test_a_bar_is_not_drawn_where_something_else_writes() -> None:
    target = console(terminal=True)
    with BatchDisplay(target, lambda: SNAPSHOT, live=False) as display:
        display.paint()
    assert "\x1b" not in printed(target)
    assert printed(target).startswith("2,500/10,000 rows (25%)")


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_two_lines_fit_every_width(width: int) -> None:
    target = console(width, terminal=True)
    huge = replace(SNAPSHOT, total=10**9, ok=10**8, failed=10**6)
    rows = target.render_lines(BatchDisplay(target, lambda: huge, lambda: stats(1, 1.0, 0, 0)).render(), pad=False)
    assert len(rows) == 2
    assert all(Segment.get_line_length(row) <= width for row in rows)


def test_at_80_columns_nothing_is_cut() -> None:
    target = console(terminal=True)
    lines = rendered(BatchDisplay(target, lambda: SNAPSHOT, lambda: stats(1, 1.0, 0, 0)), target)
    assert "…" not in "".join(lines)
    assert "ETA 1:01" in lines[1]


def test_rates_are_those_of_the_last_seconds_by_the_engines_clock() -> None:
    meter = RateMeter()
    assert meter.rates() is None
    for second in range(31):
        output = second * 10 if second <= 20 else 200 + (second - 20) * 50
        meter.add(stats(second, float(second), second * 100, output))
    assert meter.rates() == (100.0, 50.0)


def test_an_old_or_missing_reading_does_not_count() -> None:
    meter = RateMeter()
    meter.add(stats(5, 1.0, 0, 0))
    meter.add(stats(5, 1.0, 0, 0))
    meter.add(stats(4, 0.5, 0, 0))
    meter.add(None)
    assert meter.rates() is None


def test_painting_goes_by_the_clock_and_ends_when_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_progress, "PLAIN_INTERVAL_S", 0.01)
    target = console()

    async def paint_for_a_while() -> None:
        task = asyncio.create_task(BatchDisplay(target, lambda: SNAPSHOT).keep_painting())
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(paint_for_a_while())
    assert 2 <= len(printed(target).splitlines()) <= 10


def test_a_live_display_gives_the_terminal_back() -> None:
    target = console(terminal=True)
    with BatchDisplay(target, lambda: SNAPSHOT) as display:
        display.paint()
    text = printed(target)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # cursor hidden, shown again


def test_the_first_errors_are_said_and_the_rest_are_counted() -> None:
    target = console()
    lines = EventLines(target)
    for number in range(1, 10):
        lines.on_event(RowEnded(number, f"row-{number}", f"line {number}: not JSON"))
    lines.on_event(RowEnded(10, "good", None))
    said = printed(target).splitlines()
    assert said[0] == "line 1 (row-1): not JSON"
    assert len(said) == batch_progress.ERRORS_SHOWN + 1
    assert "more rows failed" in said[-1]


def test_every_error_is_said_where_no_output_has_them() -> None:
    target = console()
    lines = EventLines(target, every_error=True)
    for number in range(1, 100):
        lines.on_event(RowEnded(number, None, "not JSON"))
    assert len(printed(target).splitlines()) == 99


def test_a_long_id_is_shortened() -> None:
    target = console()
    EventLines(target).on_event(RowEnded(1, "x" * 1000, "not JSON"))
    assert printed(target) == f"line 1 ({'x' * 23}…): not JSON\n"


def test_stopping_and_a_shared_id_are_said() -> None:
    target = console()
    lines = EventLines(target)
    lines.on_event(Stopping(3, 5.0))
    lines.on_event(SharedId(4, "row-2"))
    stopping, shared = printed(target).splitlines()
    assert stopping == "stopping: 3 rows in flight have 5.0 s; Ctrl-C again stops now"
    assert shared.startswith("line 4: another row has the custom_id row-2 too")


def test_foreign_text_is_neither_markup_nor_control() -> None:
    target = console()
    EventLines(target).on_event(RowEnded(1, "[/b]\x1b[2J", "bad\n\x9b31mred"))
    assert printed(target) == "line 1 ([/b]␛[2J): bad␊<U+009B>31mred\n"
    assert "\x07" not in "".join(summary_lines(replace(SUMMARY, output="a\x07.jsonl")))


def test_summary_for_people() -> None:
    assert summary_lines(SUMMARY) == [
        "done: 8 ok, 1 failed, 3 skipped as finished earlier, in 3.0 s",
        "tokens: 1,240 in (64 reused from cache), 330 out, 110 out tok/s",
        "output: x.out.jsonl",
    ]
    assert summary_lines(replace(SUMMARY, interrupted=True))[0].startswith("interrupted: ")
    assert summary_lines(replace(SUMMARY, failed_with="engine_dead"))[0].startswith("failed: ")
    assert "(2 of them errors: --retry-errors" in summary_lines(replace(SUMMARY, skipped_failed=2))[0]
    assert "1,240 in" in summary_lines(SUMMARY, dry_run=True)[0]
    again = "finished rows are safe: run the same command again to go on"
    assert summary_lines(replace(SUMMARY, resumable=True))[-1] == again
    restarted = summary_lines(replace(SUMMARY, resumable=True), restart=True)[-1]
    assert restarted == "finished rows are safe: run the same command again without --restart to go on"
    assert again not in summary_lines(replace(SUMMARY, interrupted=True, failed_with="batch_failed"))


def test_summary_for_programs_is_one_line_of_json() -> None:
    line = summary_json(SUMMARY)
    assert "\n" not in line
    read = json.loads(line)
    assert (read["ok"], read["failed"], read["skipped"], read["output_tokens_per_s"]) == (8, 1, 3, 110.0)


@pytest.mark.parametrize(
    ("per_second", "text"),
    [(0, "0"), (0.417, "0.42"), (7.26, "7.3"), (99.94, "99.9"), (912.4, "912"), (12345, "12,345")],
)
def test_rate(per_second: float, text: str) -> None:
    assert quantities.rate(per_second) == text


def test_kv_share_is_of_blocks_in_use() -> None:
    target = console()
    one = stats(1, 1.0, 0, 0)
    full = msgspec.structs.replace(one, kv=msgspec.structs.replace(one.kv, in_use=200, free=0, cached=0))
    BatchDisplay(target, lambda: SNAPSHOT, lambda: full).paint()
    assert "KV 100%" in printed(target)
