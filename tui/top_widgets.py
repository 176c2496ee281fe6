"""The dashboard's widgets. Each draws whole lines: one widget renders any number of cells."""

from __future__ import annotations

from collections.abc import Callable

from rich.segment import Segment
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from corellm.comms.stats_messages import RequestRow

from .top_lines import Line, Span, colourless, fit, foreign, rule
from .top_palette import Palette
from .top_state import TopState
from .top_table import BY_NAME, Column, View, column_at, header_line, row_line, select

Draw = Callable[[int, int], list[Line]]  # (columns, rows) -> lines


class Lines(Widget):
    """Shows what `draw` returns for its size. `repaint` draws anew; whatever else happens shows the same lines."""

    def __init__(self, draw: Draw | None = None, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._draw = draw
        self._strips: list[Strip] = []
        self._palette: tuple[str, Palette] | None = None

    def draw(self, columns: int, rows: int) -> list[Line]:
        """The lines for this size; fewer than `rows` leave the rest blank."""
        return [] if self._draw is None else self._draw(columns, rows)

    def repaint(self) -> None:
        size = self.size
        if size.area == 0 or not self.is_attached:
            return
        palette = self._colors()
        strips = []
        for line in self.draw(size.width, size.height):
            spans = fit(colourless(line) if self.app.no_color else line, size.width)
            strips.append(Strip([Segment(span.text, palette.style(span)) for span in spans], size.width))
        if strips != self._strips:
            self._strips = strips
            self.refresh()

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips):
            return self._strips[y].apply_style(self.rich_style)
        return Strip.blank(self.size.width, self.rich_style)

    def on_resize(self) -> None:
        self.repaint()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return 1

    def _colors(self) -> Palette:
        """Made anew when the theme changes."""
        name = self.app.theme
        if self._palette is None or self._palette[0] != name:
            self._palette = (name, Palette(self.app.theme_variables))
        return self._palette[1]


class Scrolled(Lines, can_focus=True):
    """All the lines of `text`, as many of them at a time as fit."""

    BINDINGS = [  # noqa: RUF012  Textual reads them of the class
        ("up,k", "move(-1)", "Up"),
        ("down,j", "move(1)", "Down"),
        ("pageup", "page(-1)", "Page up"),
        ("pagedown", "page(1)", "Page down"),
        ("home", "move(-1000000)", "Top"),
        ("end", "move(1000000)", "Bottom"),
    ]

    def __init__(self, text: Callable[[int], list[Line]], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._text = text  # of the width
        self._offset = 0

    def draw(self, columns: int, rows: int) -> list[Line]:
        lines = self._text(columns)
        self._offset = max(0, min(self._offset, len(lines) - rows))
        return lines[self._offset : self._offset + rows]

    def action_move(self, lines: int) -> None:
        self._offset = max(0, self._offset + lines)
        self.repaint()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(self.size.height - 1, 1))

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)


class Scrub(Lines):
    """A line that says where in it one clicked, or dragged to."""

    class Moved(Message):
        """`part` is from 0 at the left end to 1 at the right."""

        def __init__(self, part: float) -> None:
            super().__init__()
            self.part = part

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self.capture_mouse()
        self._move(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if event.button:
            self._move(event.x)

    def on_mouse_up(self) -> None:
        self.release_mouse()

    def _move(self, x: int) -> None:
        self.post_message(self.Moved(min(max(x / max(self.size.width - 1, 1), 0.0), 1.0)))


class RequestTable(Lines, can_focus=True):
    """The open requests, with a cursor that stays on its request however the rows move."""

    BINDINGS = [  # noqa: RUF012
        ("up,k", "move(-1)", "Up"),
        ("down,j", "move(1)", "Down"),
        ("pageup", "page(-1)", "Page up"),
        ("pagedown", "page(1)", "Page down"),
        ("home", "move(-1000000)", "First"),
        ("end", "move(1000000)", "Last"),
        ("enter", "open", "Detail"),
    ]

    class Opened(Message):
        """One request was chosen."""

        def __init__(self, request_id: int) -> None:
            super().__init__()
            self.request_id = request_id

    def __init__(self, state: Callable[[], TopState], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.view = View()
        self._state = state
        self._rows: list[RequestRow] = []
        self._cursor: int | None = None  # the request's id
        self._at = 0  # and where it was last, for when it has ended
        self._offset = 0

    def draw(self, columns: int, rows: int) -> list[Line]:
        snapshot = self._state().snapshot
        if snapshot is None:
            self._rows = []
            return [rule("Requests", [], columns)]
        now = snapshot.stats.uptime_s
        self._rows = select(snapshot.requests, self.view, now)
        body = max(rows - 2, 0)
        at = self._cursor_index()
        self._offset = max(0, min(self._offset, len(self._rows) - body))
        self._offset = max(min(self._offset, at), at - body + 1, 0)
        lines = [rule("Requests", [self._note(len(snapshot.requests), snapshot.requests_left_out)], columns)]
        lines.append(header_line(self.view, columns))
        for index, row in enumerate(self._rows[self._offset : self._offset + body], self._offset):
            line = row_line(row, now, columns)
            if index == at:
                line = [span._replace(ground="cursor") for span in fit(line, columns)]
            lines.append(line)
        return lines

    def set_view(self, view: View) -> None:
        self.view = view
        self.repaint()

    def action_move(self, rows: int) -> None:
        if self._rows:
            index = min(max(self._cursor_index() + rows, 0), len(self._rows) - 1)
            self._cursor = self._rows[index].id
            self.repaint()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(self.size.height - 3, 1))

    def action_open(self) -> None:
        if self._rows:
            self.post_message(self.Opened(self._rows[self._cursor_index()].id))

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)

    def on_click(self, event: events.Click) -> None:
        """On the names: sort. On a row: move there; on the row of the cursor: open it."""
        if event.y == 1:
            column: Column | None = column_at(event.x, self.size.width)
            if column is not None:
                self.set_view(self.view.sorted_by(column.name))
        elif 0 <= (index := self._offset + event.y - 2) < len(self._rows) and event.y >= 2:
            if self._rows[index].id == self._cursor:
                self.action_open()
            self._cursor = self._rows[index].id
            self.repaint()

    def _cursor_index(self) -> int:
        """Where the cursor's request is; once that has ended, what has come in its place."""
        for index, row in enumerate(self._rows):
            if row.id == self._cursor:
                self._at = index
                return index
        self._at = max(0, min(self._at, len(self._rows) - 1))
        return self._at

    def _note(self, there: int, left_out: int) -> Span:
        shown = f"{len(self._rows):,}" + (f" of {there:,}" if len(self._rows) != there else "")
        more = f" +{left_out:,} not sent" if left_out else ""
        words = f"  /{self.view.words}" if self.view.words else ""
        return foreign(f"{shown}{more}  by {BY_NAME[self.view.sort].name}{words}", "dim")
