"""A batch run as it goes: a bar on a terminal, a plain line now and then elsewhere, and what it came to in the end."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from corellm.batch.progress import MIN_MEASURED_S, Event, RowEnded, SharedId, Snapshot, Stopping, Summary
from corellm.comms.messages import Stats

from . import quantities
from .bar import bar
from .foreign import one_line

PAINT_INTERVAL_S = 0.25
PLAIN_INTERVAL_S = 10.0
ERRORS_SHOWN = 5
ID_SHOWN = 24  # characters of a custom_id
_RATE_WINDOW_S = 10.0
_MIN_BAR = 8  # cells; a shorter bar says nothing


class RateMeter:
    """Tokens a second over the last seconds, from the engine's absolute counters and its own clock."""

    def __init__(self) -> None:
        self._seen: deque[Stats] = deque()

    def add(self, stats: Stats | None) -> None:
        if stats is None or (self._seen and stats.sequence <= self._seen[-1].sequence):
            return
        self._seen.append(stats)
        while len(self._seen) > 2 and stats.uptime_s - self._seen[1].uptime_s >= _RATE_WINDOW_S:
            self._seen.popleft()

    def rates(self) -> tuple[float, float] | None:
        """(prompt, output) tokens a second; None until two readings are far enough apart."""
        if len(self._seen) < 2:
            return None
        first, last = self._seen[0], self._seen[-1]
        seconds = last.uptime_s - first.uptime_s
        if seconds < MIN_MEASURED_S:
            return None
        return (
            (last.prompt_tokens - first.prompt_tokens) / seconds,
            (last.output_tokens - first.output_tokens) / seconds,
        )


class EventLines:
    """One line for each event that one should not miss.

    Of errors only the first few, since the output has them all; `every_error` is for when there is none.
    """

    def __init__(self, console: Console, *, every_error: bool = False) -> None:
        self._console = console
        self._every_error = every_error
        self._errors = self._shared = 0

    def on_event(self, event: Event) -> None:
        """Take one event in."""
        match event:
            case RowEnded(error=str(message)):
                self._errors += 1
                if self._every_error or self._errors <= ERRORS_SHOWN:
                    name = f" ({_short(event.custom_id)})" if event.custom_id is not None else ""
                    self._say(f"line {event.line}{name}: {message.removeprefix(f'line {event.line}: ')}")
                elif self._errors == ERRORS_SHOWN + 1:
                    self._say("more rows failed; the output says which and why")
            case SharedId():
                self._shared += 1
                if self._every_error or self._shared <= ERRORS_SHOWN:
                    self._say(
                        f"line {event.line}: another row has the custom_id {_short(event.custom_id)} too, one of the "
                        "two by its line number; their id fields tell them apart"
                    )
            case Stopping():
                self._say(
                    f"stopping: {event.in_flight} rows in flight have {quantities.duration(event.grace_s)}; "
                    "Ctrl-C again stops now"
                )

    def _say(self, line: str) -> None:
        self._console.print(Text(one_line(line)), soft_wrap=True)


def _short(custom_id: str) -> str:
    return custom_id if len(custom_id) <= ID_SHOWN else f"{custom_id[: ID_SHOWN - 1]}…"


class BatchDisplay:
    """Paints snapshots on a clock; run `keep_painting` as a task beside the batch.

    A context manager, which leaves the terminal as it found it. With `live` false it prints plain lines on a terminal
    too: where something else writes to it, a bar would overwrite that.
    """

    def __init__(
        self,
        console: Console,
        snapshot: Callable[[], Snapshot],
        stats: Callable[[], Stats | None] = lambda: None,
        *,
        live: bool = True,
    ) -> None:
        self._console = console
        self._snapshot = snapshot
        self._stats = stats
        self._rates = RateMeter()
        self._live = (
            Live(
                console=console,
                get_renderable=self.render,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
            )
            if live and console.is_terminal
            else None
        )

    def __enter__(self) -> BatchDisplay:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    async def keep_painting(self) -> None:
        """Paint until cancelled."""
        while True:
            await asyncio.sleep(PLAIN_INTERVAL_S if self._live is None else PAINT_INTERVAL_S)
            self.paint()

    def paint(self) -> None:
        """Paint the present state once."""
        if self._live is not None:
            self._live.refresh()
        else:
            self._console.print(Text(", ".join(self._parts(self._snapshot()))), soft_wrap=True)

    def render(self) -> Group:
        """Two lines, each cut to the console's width."""
        snapshot, width = self._snapshot(), self._console.width
        rows, *rest = self._parts(snapshot)
        lines = [Text.assemble(*self._bar(snapshot, width - len(rows) - 1), rows), Text("  ".join(rest), "dim")]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Group(*lines)

    def _bar(self, snapshot: Snapshot, room: int) -> list[Text | str]:
        cells = min(room, 40)
        if not snapshot.total or cells < _MIN_BAR:
            return []
        return [bar(snapshot.done, snapshot.total, cells), " "]

    def _parts(self, snapshot: Snapshot) -> list[str]:
        stats = self._stats()
        self._rates.add(stats)
        rates = self._rates.rates() or snapshot.rates
        share = f" ({snapshot.done * 100 // snapshot.total}%)" if snapshot.total else ""
        of = f"/{snapshot.total:,}" if snapshot.total is not None else ""
        parts = [f"{snapshot.done:,}{of} rows{share}", f"{snapshot.failed:,} errors"]
        if rates is not None:
            parts += [f"in {quantities.rate(rates[0])} tok/s", f"out {quantities.rate(rates[1])} tok/s"]
        if stats is not None:
            parts.append(f"KV {stats.kv.in_use / max(1, stats.kv.total):.0%}")
        if snapshot.stopping:
            parts.append("stopping")
        elif snapshot.eta_s is not None:
            parts.append(f"ETA {quantities.duration(snapshot.eta_s)}")
        return parts


def summary_lines(summary: Summary, *, dry_run: bool = False, restart: bool = False) -> list[str]:
    """What a run came to, for people; `restart`: its command would throw it away."""
    prompt = f"{summary.prompt_tokens:,} in"
    if dry_run:
        end = "stopped" if summary.failed_with else "checked"
        valid = f"{summary.ok:,} rows can run, {summary.failed:,} can not"
        return [f"{end}: {valid}; {prompt}", "nothing was run (--dry-run)"]
    end = "failed" if summary.failed_with else "interrupted" if summary.interrupted else "done"
    skipped = f"{summary.skipped:,} skipped as finished earlier"
    if summary.skipped_failed:
        skipped += f" ({summary.skipped_failed:,} of them errors: --retry-errors runs them again)"
    lines = [
        f"{end}: {summary.ok:,} ok, {summary.failed:,} failed, {skipped}, in {quantities.duration(summary.wall_s)}",
        f"tokens: {prompt} ({summary.cached_tokens:,} reused from cache), {summary.output_tokens:,} out, "
        f"{quantities.rate(summary.output_rate)} out tok/s",
    ]
    if summary.output:
        lines.append(f"output: {summary.output}")
        if summary.resumable:
            without = " without --restart" if restart else ""
            lines.append(f"finished rows are safe: run the same command again{without} to go on")
    return [one_line(line) for line in lines]


def summary_json(summary: Summary) -> str:
    """The same for programs: one line of JSON."""
    return json.dumps({**asdict(summary), "output_tokens_per_s": round(summary.output_rate, 3)})
