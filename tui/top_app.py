"""The dashboard: panels over the state of one source, painted by a clock."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import monotonic

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Input

from corellm.running_engines import RunningEngine

from . import top_panels
from .top_lines import Line, Span, fit, spread, width
from .top_screens import EnginePicker, Sheet, explain_sheet, help_sheet, request_sheet, tree_sheet
from .top_sources import LiveSource, Source, scrub_line
from .top_style import CSS
from .top_table import BY_LETTER, BY_NAME, View
from .top_tree import TokenText
from .top_widgets import Lines, RequestTable, Scrub

PAINT_S = 0.1
PANELS = ("requests", "kv", "steps", "rates")
NARROW = (70, 18)  # columns and rows below which the narrow layout is shown
WIDE = (100, 32)  # from which the wide one is
HINTS = (  # the first that fits is shown
    "/ filter  s sort  e explain  t tree  ? help  q quit",
    "e explain  ? help  q quit",
    "? help  q quit",
)
INTERRUPTED = 130  # exit code


class TopApp(App[None]):
    """`corellm top` on a terminal. With several `engines` it first asks which one, and then watches that."""

    CSS = CSS
    TITLE = "corellm top"
    BINDINGS = [  # noqa: RUF012  Textual reads them of the class
        ("q", "quit", "Leave"),
        Binding("ctrl+c", "interrupt", "Leave", priority=True),  # also where an entry or a sheet has the keys
        Binding("ctrl+z", "suspend_process", "Suspend", priority=True),
        ("space", "hold", "Hold or go on"),
        ("slash", "filter", "Filter"),
        ("s", "sort_next", "Sort by the next column"),
        ("r", "reverse", "Sort the other way round"),
        ("e", "explain", "Explain"),
        ("t", "tree", "Radix tree"),
        ("question_mark", "help", "Keys"),
        ("escape,0", "all_panels", "All panels"),
        ("1", "panel('requests')", "Requests alone"),
        ("2", "panel('kv')", "KV cache alone"),
        ("3", "panel('steps')", "Steps alone"),
        ("4", "panel('rates')", "Rates alone"),
        ("left", "seek(-5)", "5 s back"),
        ("right", "seek(5)", "5 s on"),
        ("shift+left", "seek(-30)", "30 s back"),
        ("shift+right", "seek(30)", "30 s on"),
        ("comma", "seek(-0.25)", "A little back"),
        ("full_stop", "seek(0.25)", "A little on"),
        ("plus,equals_sign", "speed(1)", "Faster"),
        ("minus", "speed(-1)", "Slower"),
    ]

    def __init__(self, source: Source, *, token_text: TokenText, engines: Sequence[RunningEngine] = ()) -> None:
        super().__init__()
        self.source = source
        self._token_text = token_text
        self._engines = engines
        self._panel: str | None = None
        self._painted: tuple[Screen[object], int] | None = None
        self._ticked_at = monotonic()

    def compose(self) -> ComposeResult:
        yield Lines(lambda columns, rows: top_panels.header(self.source.state, columns), id="header")
        with Horizontal(id="pair"):
            yield Lines(lambda columns, rows: top_panels.kv_cache(self.source.state, columns, rows), id="kv")
            yield Lines(lambda columns, rows: top_panels.rates(self.source.state, columns, rows), id="rates")
        yield Lines(lambda columns, rows: top_panels.gauges(self.source.state, columns), id="gauges")
        yield Lines(lambda columns, rows: top_panels.steps(self.source.state, columns, rows), id="steps")
        yield RequestTable(lambda: self.source.state, id="requests")
        if self.source.player is not None:
            yield Scrub(self._scrub, id="scrub")
        yield Input(placeholder="words that a request must hold, such as: waiting blocks", id="filter", compact=True)
        yield Lines(self._footer, id="footer")

    def on_mount(self) -> None:
        self.query_one(RequestTable).focus()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # or the terminal would stay as it is now
            asyncio.get_running_loop().add_signal_handler(number, self.action_interrupt)
        self.set_interval(PAINT_S, self.tick)
        self.theme_changed_signal.subscribe(self, lambda theme: self.paint(whatever=True))
        self.app_resume_signal.subscribe(self, lambda app: self.screen.refresh())  # after Ctrl-Z and fg
        if self._engines:
            self.push_screen(EnginePicker(self._engines), self._watch)
        else:
            self.run_worker(self.source.run(), exclusive=True)

    def action_interrupt(self) -> None:
        self.exit(return_code=INTERRUPTED)

    def tick(self) -> None:
        """Let the source's time pass, and paint what has changed."""
        now = monotonic()
        self.source.tick(now - self._ticked_at)
        self._ticked_at = now
        self.paint()

    def paint(self, *, whatever: bool = False) -> None:
        """The screen on top, if the state or the screen is another than when it was last painted."""
        seen = (self.screen, self.source.state.version)
        if seen == self._painted and not whatever:
            return
        self._painted = seen
        for lines in self.screen.query(Lines):
            lines.repaint()

    # ---- what is shown --------------------------------------------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        size = event.size
        is_narrow = size.width < NARROW[0] or size.height < NARROW[1]
        main = self.screen_stack[0]
        main.set_class(is_narrow, "narrow")
        main.set_class(size.width >= WIDE[0] and size.height >= WIDE[1], "wide")

    def action_panel(self, name: str) -> None:
        self._show_panel(None if name == self._panel else name)

    def action_all_panels(self) -> None:
        """Close the filter, else show all panels."""
        if self.query_one("#filter").has_class("open") or self._table.view.words:
            self._set_words("")
            self._close_filter()
        else:
            self._show_panel(None)

    def _show_panel(self, name: str | None) -> None:
        self._panel = name
        main = self.screen_stack[0]
        main.set_class(name is not None, "only")
        for panel in PANELS:
            main.set_class(panel == name, f"only-{panel}")
        self.call_after_refresh(self.paint, whatever=True)

    def _footer(self, columns: int, rows: int) -> list[Line]:
        """What the source has to say, and as many hints as there is room for beside it."""
        status = [*self.source.status(), Span(" ")]
        hints = next((hints for hints in HINTS if len(hints) + width(status) < columns), "")
        return [spread([Span(hints, "dim")], status, columns) if hints else fit(status, columns)]

    # ---- the source -----------------------------------------------------------------------------------------------

    def action_hold(self) -> None:
        self.source.toggle()
        self.paint()

    def action_seek(self, seconds: float) -> None:
        if (player := self.source.player) is not None:
            self.source.seek(player.position_s + seconds)
            self.paint()

    def action_speed(self, direction: int) -> None:
        if (player := self.source.player) is not None:
            player.faster() if direction > 0 else player.slower()
            self.paint(whatever=True)

    def on_scrub_moved(self, message: Scrub.Moved) -> None:
        if (player := self.source.player) is not None:
            self.source.seek(message.part * player.recording.duration_s)
            self.paint()

    def _scrub(self, columns: int, rows: int) -> list[Line]:
        return [] if self.source.player is None else [scrub_line(self.source.player, columns)]

    def _watch(self, engine: RunningEngine | None) -> None:
        self.source = LiveSource(engine)
        self.run_worker(self.source.run(), exclusive=True)

    # ---- requests -------------------------------------------------------------------------------------------------

    @property
    def _table(self) -> RequestTable:
        return self.screen_stack[0].query_one(RequestTable)

    def on_key(self, event: events.Key) -> None:
        name = BY_LETTER.get(event.character or "")
        if name is not None and len(self.screen_stack) == 1:
            self._table.set_view(self._table.view.sorted_by(name))

    def action_sort_next(self) -> None:
        self._table.set_view(self._table.view.next_column())

    def action_reverse(self) -> None:
        view = self._table.view
        self._table.set_view(replace(view, descending=not view.descending))

    def action_sort_by(self, name: str) -> None:
        self._table.set_view(View(sort=name, words=self._table.view.words))

    def action_filter(self) -> None:
        entry = self.query_one("#filter", Input)
        entry.add_class("open")
        entry.focus()

    def on_input_changed(self, message: Input.Changed) -> None:
        self._set_words(message.value)

    def on_input_submitted(self) -> None:
        self._close_filter()

    def _set_words(self, words: str) -> None:
        self.query_one("#filter", Input).value = words
        self._table.set_view(replace(self._table.view, words=words))

    def _close_filter(self) -> None:
        self.query_one("#filter").remove_class("open")
        self._table.focus()

    def on_request_table_opened(self, message: RequestTable.Opened) -> None:
        self.push_screen(request_sheet(self.source.state, message.request_id))

    # ---- sheets ---------------------------------------------------------------------------------------------------

    def action_help(self) -> None:
        self.push_screen(help_sheet())

    def action_explain(self) -> None:
        self.push_screen(explain_sheet(self.source.state))

    def action_tree(self) -> None:
        """The engine makes trees only while this is open."""
        self.source.want_trees(True)
        self.push_screen(tree_sheet(self.source.state, self._token_text), lambda _: self.source.want_trees(False))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        if isinstance(screen, Sheet):
            return
        yield SystemCommand("Explain", "What the engine is doing and why", self.action_explain)
        yield SystemCommand("Radix tree", "What is shared by whom", self.action_tree)
        yield SystemCommand("Filter", "Show only some requests", self.action_filter)
        yield SystemCommand("Hold", "Hold the picture, or let it go on", self.action_hold)
        for name in BY_NAME:
            yield SystemCommand(f"Sort by {name}", "Order of the requests", lambda name=name: self.action_sort_by(name))
