"""The start of an engine: named stages with progress, then one summary line. Everything goes to stderr."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from corellm.comms.messages import EngineInfo, Progress

from . import quantities
from .bar import bar
from .foreign import one_line

PLAIN_INTERVAL_S = 10.0
REFRESH_HZ = 8
_BAR_CELLS = 20


@dataclass(slots=True)
class Stage:
    """One stage of the start-up, summed over ranks. Times are readings of the display's clock, in seconds."""

    name: str
    started: float
    measured_from: float  # when the work that `done` counts began: a stage may have several parts
    ended: float | None = None
    detail: str = ""
    unit: str = ""
    by_rank: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank -> (done, total)

    @property
    def done(self) -> int:
        return sum(done for done, _ in self.by_rank.values())

    @property
    def total(self) -> int:
        """0 while any rank's total is unknown."""
        totals = [total for _, total in self.by_rank.values()]
        return sum(totals) if all(totals) else 0

    def describe(self, now: float) -> str:
        """Amounts, rate and time left while it runs; amounts, rate and time taken when it has ended."""
        end = now if self.ended is None else self.ended
        elapsed = end - self.measured_from
        parts = [self.detail] if self.detail else []
        if self.done and self.unit:
            running = self.ended is None and self.done < self.total
            amount = quantities.quantity(self.done, self.unit)
            parts.append(f"{amount} of {quantities.quantity(self.total, self.unit)}" if running else amount)
            if self.unit == "B" and elapsed > 0:
                parts.append(f"{quantities.size(self.done / elapsed)}/s")
            if running and elapsed > 0:
                parts.append(f"ETA {quantities.duration((self.total - self.done) * elapsed / self.done)}")
        if self.ended is not None:
            parts.append(quantities.duration(end - self.started))
        return ", ".join(parts)


class StartupDisplay:
    """Shows `Progress` as it arrives: a live list of stages on a terminal, one plain line for each stage elsewhere.

    A context manager: leaving it with an exception marks the stage at which the start-up failed.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._stages: list[Stage] = []
        self._lock = threading.RLock()  # downloads report from threads of their own, and Live paints from another
        self._failed = False
        self._last_line_at = clock()
        self._live = (
            Live(console=console, get_renderable=self.render, refresh_per_second=REFRESH_HZ, redirect_stdout=False)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> StartupDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._failed = error is not None
        self._end_stage()
        if self._live is not None:
            self._live.stop()

    def report(self, progress: Progress) -> None:
        """Take one event in. A stage ends when another begins; a slower rank may still report on an earlier one."""
        with self._lock:
            now = self._clock()
            stage = next((known for known in self._stages if known.name == progress.stage), None)
            if stage is None:
                self._end_stage()
                stage = Stage(progress.stage, started=now, measured_from=now)
                self._stages.append(stage)
                self._last_line_at = now
            if progress.detail and progress.detail != stage.detail:
                stage.detail, stage.measured_from = progress.detail, now
            stage.unit = progress.unit or stage.unit
            stage.by_rank[progress.rank] = (progress.done, progress.total)
            if stage.ended is None and now - self._last_line_at >= PLAIN_INTERVAL_S:
                self._plain(stage)

    def ready(self, info: EngineInfo) -> None:
        """Print the summary line; call after the display has closed."""
        self._console.print(Text(summary_line(info)), soft_wrap=not self._console.is_terminal)

    def render(self) -> Group:
        """The list of stages as it stands, every line cut to the console's width."""
        now, width = self._clock(), self._console.width
        with self._lock:
            return Group(*(self._line(stage, now, width) for stage in self._stages))

    def _end_stage(self) -> None:
        if self._stages and self._stages[-1].ended is None:
            stage = self._stages[-1]
            stage.ended = self._clock()
            self._plain(stage)

    def _plain(self, stage: Stage) -> None:
        if self._live is not None:
            return
        now = self._clock()
        self._last_line_at = now
        state = "" if stage.ended is None else "failed " if self._failed else "done "
        line = f"{stage.name}: {state}({stage.describe(now)})"
        self._console.print(Text(one_line(line)), soft_wrap=True)

    def _line(self, stage: Stage, now: float, width: int) -> Text:
        failed = self._failed and stage is self._stages[-1]
        mark, style = ("✗", "red") if failed else ("•", "cyan") if stage.ended is None else ("✓", "green")
        line = Text.assemble((mark, style), f" {one_line(stage.name):<16} ")
        if stage.ended is None and stage.total and stage.unit and width >= 70:
            line.append(bar(stage.done, stage.total, _BAR_CELLS)).append(" ")
        line.append(one_line(stage.describe(now)), "dim")
        line.truncate(width, overflow="ellipsis")
        return line


def summary_line(info: EngineInfo) -> str:
    """Everything one wants to know of a started engine, in one line."""
    held = info.kv_blocks * info.page_size
    return one_line(
        f"{info.model} ready: {info.dtype}, tp {info.tp}, {info.device}, "
        f"{info.kv_blocks:,} KV blocks for {held:,} tokens, "
        f"longest request {info.max_request_tokens:,} tokens, {quantities.duration(info.startup_s)}"
    )
