"""What opens over the dashboard: help, explanation, tree, one request, the choice of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen

from corellm.running_engines import RunningEngine

from . import quantities
from .top_explain import explain
from .top_lines import Line, Span, foreign, wrapped
from .top_state import TopState
from .top_table import detail_lines
from .top_tree import TokenText, tree_lines
from .top_widgets import Lines, Scrolled

HELP = (
    ("/", "show only requests that hold all the words: waiting, blocks, batch, #12, again (was preempted)"),
    ("s  r", "sort the requests by the next column; the other way round"),
    ("Shift-letter", "sort by a column: I id, S state, L lacks, P prompt, O out, M max, C cached, B blocks, A age, "
     "T TTFT, R tok/s, E preemptions, K class"),
    ("Enter", "all that is known of the request under the cursor"),
    ("1 2 3 4", "one panel alone: requests, KV cache, steps, rates; again or 0: all of them"),
    ("e", "explain what the engine is doing and why"),
    ("t", "the radix tree: what is shared by whom, and where two prompts part"),
    ("Space", "hold the picture, or let it go on; in a replay pause and play"),
    ("← →", "in a replay 5 s back or on; with Shift 30 s; , and . by a quarter of a second"),
    ("+ −", "in a replay faster or slower"),
    ("Ctrl-P", "palette: themes, screenshot, everything"),
    ("q  Ctrl-C", "leave; the engine does not notice"),
)  # fmt: skip


class Sheet(ModalScreen[None]):
    """Text in a frame over the dashboard. Escape closes it; it follows the state as long as it is open."""

    BINDINGS = [("escape,q,enter", "dismiss", "Close")]  # noqa: RUF012

    def __init__(self, title: str, text: Callable[[int], list[Line]]) -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical(id="sheet") as box:
            box.border_title = self._title  # ours, so it may be markup
            box.border_subtitle = "Esc closes"
            yield Scrolled(self._text, id="sheet-text")


def help_sheet() -> Sheet:
    return Sheet("Keys", _help_lines)


def explain_sheet(state: TopState) -> Sheet:
    return Sheet("What the engine is doing", lambda cells: _paragraphs(explain(state), cells))


def tree_sheet(state: TopState, token_text: TokenText) -> Sheet:
    return Sheet("Radix tree", lambda cells: tree_lines(state.tree, token_text))


def request_sheet(state: TopState, request_id: int) -> Sheet:
    """One request for as long as it is open; then the last that was known of it."""
    last: list[Line] = []

    def text(cells: int) -> list[Line]:
        snapshot = state.snapshot
        rows = snapshot.requests if snapshot is not None else []
        row = next((row for row in rows if row.id == request_id), None)
        if row is None or snapshot is None:
            return [*last, [Span("")], [Span("this request has ended", "warn")]]
        last[:] = detail_lines(row, snapshot.stats.uptime_s)
        return last

    return Sheet(f"Request {request_id}", text)


class EnginePicker(ModalScreen[RunningEngine]):
    """One of several engines, by arrows and Enter or by its number."""

    BINDINGS = [  # noqa: RUF012
        ("up,k", "move(-1)", "Up"),
        ("down,j", "move(1)", "Down"),
        ("enter", "choose", "Watch"),
        ("escape,q", "app.quit", "Leave"),
    ]

    def __init__(self, engines: Sequence[RunningEngine]) -> None:
        super().__init__()
        self._engines = engines
        self._at = 0

    def compose(self) -> ComposeResult:
        with Vertical(id="sheet") as box:
            box.border_title = "Several engines run: which one?"
            box.border_subtitle = "Enter watches it"
            yield Lines(self._draw, id="sheet-text")

    def action_move(self, rows: int) -> None:
        self._at = (self._at + rows) % len(self._engines)
        self.query_one(Lines).repaint()

    def action_choose(self) -> None:
        self.dismiss(self._engines[self._at])

    def on_key(self, event: events.Key) -> None:
        if event.key.isdecimal() and 1 <= int(event.key) <= len(self._engines):
            self.dismiss(self._engines[int(event.key) - 1])

    def _draw(self, columns: int, rows: int) -> list[Line]:
        first = max(0, self._at - rows + 1)
        return [
            self._line(number, engine) for number, engine in enumerate(self._engines[first : first + rows], first + 1)
        ]

    def _line(self, number: int, engine: RunningEngine) -> Line:
        info = engine.info
        mark = Span("▶ ", "title") if number - 1 == self._at else Span("  ")
        blocks = f"  {info.device}, tp {info.tp}, {quantities.quantity(info.kv_blocks, 'KV blocks')}"
        return [
            mark,
            Span(f"{number} ", "dim"),
            foreign(info.name, "strong"),
            foreign(f"  {info.model}"),
            foreign(blocks, "dim"),
        ]


def _help_lines(cells: int) -> list[Line]:
    lines: list[Line] = []
    for keys, does in HELP:
        first, *rest = wrapped(does, cells - 14)
        lines.append([Span(f"{keys:<14}", "title"), *first])
        lines += [[Span(" " * 14), *line] for line in rest]
    return lines


def _paragraphs(paragraphs: Sequence[tuple[str, str]], cells: int) -> list[Line]:
    lines: list[Line] = []
    for heading, text in paragraphs:
        lines += [[foreign(heading, "title")], *wrapped(foreign(text).text, cells), [Span("")]]
    return lines[:-1]
