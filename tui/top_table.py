"""The table of open requests: its columns, how it is sorted and filtered, and one request in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from corellm.comms.stats_messages import RequestRow

from . import quantities
from .top_lines import Line, Span

PRIORITIES = {0: "interactive", 1: "batch"}
WAITS = {
    "slots": "a sequence slot",
    "blocks": "KV blocks",
    "tokens": "room in the token budget of a step",
    "mask": "the mask of tokens that its format allows next",
    "fence": "the result of the step that still names it",
    "turn": "its turn behind the head of the queue",
}
STATE_ROLES = {"waiting": "warn", "prefill": "prefill", "decode": "decode", "preempted": "bad"}


def age(row: RequestRow, now: float) -> float:
    """Seconds since it arrived."""
    return max(now - row.arrived_s, 0.0)


def first_token(row: RequestRow) -> float | None:
    """Seconds from arrival to the first token."""
    return None if row.first_token_s is None else row.first_token_s - row.arrived_s


def speed(row: RequestRow, now: float) -> float:
    """Output tokens a second since the first one; 0 until there are two."""
    if row.first_token_s is None or row.output_tokens < 2:
        return 0.0
    return (row.output_tokens - 1) / max(now - row.first_token_s, 1e-6)


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `key` gives what it sorts by, `text` what it shows; both take a row and the engine's uptime."""

    name: str
    letter: str  # Shift and this sorts by it
    cells: int
    key: Callable[[RequestRow, float], Any]
    text: Callable[[RequestRow, float], str]
    from_columns: int = 0  # shown on screens at least this wide


def _count(name: str) -> tuple[Callable[[RequestRow, float], Any], Callable[[RequestRow, float], str]]:
    return (lambda row, now: getattr(row, name)), (lambda row, now: str(getattr(row, name)))


def _seconds(value: float | None) -> str:
    return "-" if value is None else quantities.duration(value) if value >= 1 else f"{value * 1000:.0f} ms"


_STATES = ("decode", "prefill", "preempted", "waiting")

COLUMNS = (
    Column("id", "I", 7, *_count("id")),
    Column("state", "S", 9, lambda row, now: (_STATES.index(row.state), row.id), lambda row, now: row.state),
    Column("lacks", "L", 7, lambda row, now: row.wait, lambda row, now: row.wait or "-"),
    Column("prompt", "P", 7, *_count("prompt_tokens")),
    Column("out", "O", 6, *_count("output_tokens")),
    Column("max", "M", 6, *_count("max_tokens"), from_columns=92),
    Column("cached", "C", 7, *_count("cached_tokens"), from_columns=57),
    Column("blocks", "B", 7, *_count("blocks"), from_columns=92),
    Column("age", "A", 7, age, lambda row, now: _seconds(age(row, now))),
    Column("TTFT", "T", 7, lambda row, now: first_token(row) or 0.0, lambda row, now: _seconds(first_token(row)), 65),
    Column("tok/s", "R", 6, speed, lambda row, now: quantities.rate(speed(row, now)), 72),
    Column("pre", "E", 4, *_count("preemptions"), from_columns=77),
    Column("class", "K", 12, lambda row, now: row.priority, lambda row, now: _priority(row), 105),
)
BY_LETTER = {column.letter: column.name for column in COLUMNS}
BY_NAME = {column.name: column for column in COLUMNS}


def _priority(row: RequestRow) -> str:
    return PRIORITIES.get(row.priority, str(row.priority))


@dataclass(frozen=True, slots=True)
class View:
    """What of the table is shown: the order, and the words that a row must hold, all of them."""

    sort: str = "state"
    descending: bool = False
    words: str = ""

    def sorted_by(self, name: str) -> View:
        """By this column; the other way round if it is already."""
        return replace(self, sort=name, descending=not self.descending if name == self.sort else False)

    def next_column(self) -> View:
        names = list(BY_NAME)
        return replace(self, sort=names[(names.index(self.sort) + 1) % len(names)], descending=False)


def select(rows: Sequence[RequestRow], view: View, now: float) -> list[RequestRow]:
    """The rows that hold every word of the filter, in the view's order."""
    words = view.words.lower().split()
    found = [row for row in rows if all(word in _searched(row) for word in words)] if words else list(rows)
    key = BY_NAME[view.sort].key
    found.sort(key=lambda row: key(row, now), reverse=view.descending)
    return found


def _searched(row: RequestRow) -> str:
    return f"#{row.id} {row.state} {row.wait} {_priority(row)}{' again' if row.preemptions else ''}"


def shown_columns(cells: int) -> list[Column]:
    """Those that a screen of this width shows."""
    return [column for column in COLUMNS if cells >= column.from_columns]


def header_line(view: View, cells: int) -> Line:
    """The names; an arrow stands at the one that the table is sorted by."""
    line: Line = []
    for column in shown_columns(cells):
        sorted_by = column.name == view.sort
        arrow = ("▼" if view.descending else "▲") if sorted_by else ""
        line.append(Span(_cell(column, column.name + arrow), "title" if sorted_by else "dim"))
    return line


def row_line(row: RequestRow, now: float, cells: int) -> Line:
    line: Line = []
    for column in shown_columns(cells):
        line.append(Span(_cell(column, column.text(row, now)), _role(column, row)))
    return line


def _role(column: Column, row: RequestRow) -> str:
    if column.name == "state":
        return STATE_ROLES[row.state]
    if column.name == "lacks":
        return "warn" if row.wait else "dim"
    return "text"


def column_at(x: int, cells: int) -> Column | None:
    """The column that a click at cell `x` is in."""
    for column in shown_columns(cells):
        if x < column.cells + 1:
            return column
        x -= column.cells + 1
    return None


def _cell(column: Column, text: str) -> str:
    """Words to the left, numbers to the right, one cell between columns. What is cut off is seen to be."""
    if len(text) > column.cells:
        text = text[: column.cells - 1] + "…"
    return f"{text:<{column.cells}} " if column.name in ("state", "lacks", "class") else f"{text:>{column.cells}} "


def detail_lines(row: RequestRow, now: float) -> list[Line]:
    """Everything known of one request."""
    facts = [
        ("state", row.state + (f", waits for {WAITS.get(row.wait, row.wait)}" if row.wait else "")),
        ("class", _priority(row)),
        ("prompt", f"{row.prompt_tokens:,} tokens, {row.cached_tokens:,} of them from the cache"),
        ("output", f"{row.output_tokens:,} of at most {row.max_tokens:,} tokens"),
        ("computed", f"KV of {row.computed_tokens:,} tokens, in {row.blocks:,} blocks"),
        ("age", _seconds(age(row, now))),
        ("first token", _seconds(first_token(row))),
        ("speed", f"{quantities.rate(speed(row, now))} tok/s since its first token"),
        ("preemptions", f"{row.preemptions:,}"),
    ]
    return [[Span(f"{name:<12}", "dim"), Span(text)] for name, text in facts]
