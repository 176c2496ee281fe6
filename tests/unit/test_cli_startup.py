"""The start-up display: stages, amounts, rates, the summary line; on a terminal and without one."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console
from rich.segment import Segment

from corellm.comms.messages import EngineInfo, Progress
from corellm_tui import quantities
from corellm_tui.startup import StartupDisplay, summary_line

INFO = EngineInfo(
    name="a", model="demo", model_path="/m", dtype="float32", device="cpu", tp=2, kv_cache="radix", page_size=16,
    kv_blocks=4096, max_model_len=8192, max_batch_tokens=1024, max_seqs=64, vocab=49152, seed=0, load_format="auto",
    max_request_tokens=8192, startup_s=3.21,
)  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=80)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, height=24, force_terminal=True, color_system="standard")


def lines_of(display: StartupDisplay, console: Console) -> list[str]:
    rows = console.render_lines(display.render(), pad=False)
    return ["".join(segment.text for segment in Segment.strip_styles(row)) for row in rows]


def report_weights(display: StartupDisplay, clock: Clock) -> None:
    display.report(Progress(stage="resolve model", detail="demo"))
    clock.now += 0.5
    display.report(Progress(stage="read weights", total=400_000_000, unit="B"))
    clock.now += 2.0
    display.report(Progress(stage="read weights", done=100_000_000, total=400_000_000, unit="B"))


def test_without_a_terminal_each_stage_is_one_plain_line() -> None:
    console, clock = plain_console(), Clock()
    with StartupDisplay(console, clock) as display:
        report_weights(display, clock)
        clock.now += 2.0
        display.report(Progress(stage="read weights", done=400_000_000, total=400_000_000, unit="B"))
        display.report(Progress(stage="warm up"))
        clock.now += 1.0
    display.ready(INFO)
    assert printed(console).splitlines() == [
        "resolve model: done (demo, 0.5 s)",
        "read weights: done (400 MB, 100 MB/s, 4.0 s)",
        "warm up: done (1.0 s)",
        summary_line(INFO),
    ]


def test_a_long_stage_says_every_ten_seconds_that_it_lives() -> None:
    console, clock = plain_console(), Clock()
    with StartupDisplay(console, clock) as display:
        for second in range(26):
            display.report(Progress(stage="read weights", done=second * 10**6, total=50 * 10**6, unit="B"))
            clock.now += 1.0
    lines = printed(console).splitlines()
    assert lines == [
        "read weights: (10.0 MB of 50.0 MB, 1.00 MB/s, ETA 40 s)",
        "read weights: (20.0 MB of 50.0 MB, 1.00 MB/s, ETA 30 s)",
        "read weights: done (25.0 MB, 962 kB/s, 26 s)",
    ]


def test_ranks_are_summed_and_a_slow_rank_does_not_reopen_a_stage() -> None:
    console, clock = terminal(80), Clock()
    display = StartupDisplay(console, clock)
    for rank in (0, 1):
        display.report(Progress(stage="read weights", done=10_000_000, total=20_000_000, unit="B", rank=rank))
    clock.now += 1.0
    assert "20.0 MB of 40.0 MB, 20.0 MB/s, ETA 1.0 s" in lines_of(display, console)[0]
    display.report(Progress(stage="warm up", rank=0))
    display.report(Progress(stage="read weights", done=20_000_000, total=20_000_000, unit="B", rank=1))
    assert [line[2:14] for line in lines_of(display, console)] == ["read weights", "warm up     "]


def test_a_total_that_one_rank_does_not_know_is_unknown() -> None:
    console, clock = terminal(80), Clock()
    display = StartupDisplay(console, clock)
    display.report(Progress(stage="read weights", done=10_000_000, total=90_000_000, unit="B", rank=0))
    display.report(Progress(stage="read weights", done=10_000_000, unit="B", rank=1))
    clock.now += 1.0
    line = lines_of(display, console)[0]
    assert "20.0 MB, 20.0 MB/s" in line
    assert "ETA" not in line


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_every_line_fits_the_terminal(width: int) -> None:
    console, clock = terminal(width), Clock()
    display = StartupDisplay(console, clock)
    report_weights(display, clock)
    display.report(Progress(stage="名前" * 30, detail="模型" * 40))
    rows = console.render_lines(display.render(), pad=False)
    assert len(rows) == 3
    assert all(Segment.get_line_length(row) <= width for row in rows)


def test_the_bar_shows_the_share_that_is_done() -> None:
    console, clock = terminal(80), Clock()
    display = StartupDisplay(console, clock)
    report_weights(display, clock)
    bar = next(segment for segment in console.render(display.render()) if "━" in segment.text)
    assert bar.text == "━" * 5  # a quarter of twenty cells, in the bar's own colour
    assert lines_of(display, console)[1].count("╌") == 15  # without colour too, empty cells look empty


def test_a_failure_marks_its_stage_and_leaves_the_error_alone() -> None:
    console, clock = terminal(80), Clock()
    with pytest.raises(RuntimeError, match="boom"), StartupDisplay(console, clock) as display:  # noqa: PT012
        report_weights(display, clock)
        raise RuntimeError("boom")
    resolve, weights = lines_of(display, console)
    assert resolve.startswith("✓")
    assert weights.startswith("✗")


def test_foreign_text_is_neither_markup_nor_control() -> None:
    console = plain_console()
    with StartupDisplay(console, Clock()) as display:
        display.report(Progress(stage="resolve model", detail="[/red]\x1b[2J\nfake"))
    display.ready(msgspec.structs.replace(INFO, model="[bold]\x1b]0;x\x07"))
    text = printed(console)
    assert "[/red]␛[2J␊fake" in text
    assert "[bold]␛]0;x␇" in text
    assert "\x1b" not in text


def test_summary_line_says_everything() -> None:
    assert summary_line(INFO) == (
        "demo ready: float32, tp 2, cpu, 4,096 KV blocks for 65,536 tokens, longest request 8,192 tokens, 3.2 s"
    )


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1540, "1.54 kB"), (269_060_552, "269 MB"), (16.1e9, "16.1 GB")]
)
def test_size(count: float, text: str) -> None:
    assert quantities.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.6, "1:00"), (187, "3:07"), (7387, "2:03:07")],
)
def test_duration(seconds: float, text: str) -> None:
    assert quantities.duration(seconds) == text
