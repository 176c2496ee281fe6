"""The live region against a terminal emulator: after any sequence of paints the screen has what it should."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pyte
import pytest

from corellm_tui.live_region import LiveRegion


class Screen:
    """A terminal of a given size that keeps what has scrolled away."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.written: list[str] = []
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self._stream = pyte.Stream(self._screen)

    def write(self, text: str) -> None:
        self.written.append(text)
        self._stream.feed(text)

    def size(self) -> tuple[int, int]:
        return self.columns, self.rows

    def resize(self, columns: int) -> None:
        self.columns = columns
        self._screen.resize(self.rows, columns)

    def lines(self) -> list[str]:
        scrolled = ["".join(row[column].data for column in range(self.columns)) for row in self._screen.history.top]
        lines = [line.rstrip() for line in [*scrolled, *self._screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines


def paint(region: LiveRegion, kept: list[str], final: Sequence[str], live: Sequence[str]) -> list[str]:
    """Paint, and return what the screen should have; `kept` grows by what is final."""
    kept += final
    frozen = region.paint(final, live)
    expected = [*kept, *live]
    kept += live[:frozen]
    return expected


@pytest.mark.parametrize("seed", range(30))
def test_any_sequence_of_paints(seed: int) -> None:
    source = random.Random(seed)
    screen = Screen(20, 6)
    screen.write("above\r\n")
    region = LiveRegion(screen.write, screen.size)
    kept, live = ["above"], [""]
    for _ in range(40):
        final = [f"final {source.random():.9f}" for _ in range(source.choice([0, 0, 0, 1, 3]))]
        if source.random() < 0.5:
            live = [f"live {source.random():.9f}" for _ in range(source.randint(0, 9))]
        elif live:
            live = [*live[:-1], live[-1][:12] + "+"]
        expected = paint(region, kept, final, live)
        assert screen.lines() == expected
        live = live[max(len(live) - (screen.rows - 1), 0) :]


def test_a_line_that_grows_is_written_alone() -> None:
    screen = Screen(40, 10)
    region = LiveRegion(screen.write, screen.size)
    region.paint([], ["first", "second", "third"])
    screen.written.clear()
    region.paint([], ["first", "second", "third and more"])
    region.paint([], ["first", "second", "third and more", "fourth"])
    written = "".join(screen.written)
    assert "first" not in written
    assert "second" not in written
    assert len(screen.written) == 2


def test_what_has_not_changed_is_not_written() -> None:
    screen = Screen(40, 10)
    region = LiveRegion(screen.write, screen.size)
    region.paint([], ["same"])
    screen.written.clear()
    region.paint([], ["same"])
    assert screen.written == []


def test_lines_as_wide_as_the_terminal() -> None:
    screen = Screen(10, 6)
    region = LiveRegion(screen.write, screen.size)
    region.paint([], ["0123456789", "abcdefghij"])
    region.paint(["0123456789", "abcdefghij"], ["日本日本日"])
    region.paint(["日本日本日"], [])
    assert [line.replace(" ", "") for line in screen.lines()] == ["0123456789", "abcdefghij", "日本日本日"]


def test_a_wider_terminal_is_painted_anew() -> None:
    screen = Screen(20, 8)
    region = LiveRegion(screen.write, screen.size)
    region.paint(["final"], ["live one", "live two"])
    screen.resize(40)
    region.paint([], ["live one live two"])
    assert screen.lines() == ["final", "live one live two"]


def test_a_narrower_terminal_that_breaks_lines_anew() -> None:
    """Terminals turn a line of 16 columns into two rows of 8; the region counts them."""
    screen = Screen(16, 8)
    region = LiveRegion(screen.write, screen.size)
    region.paint(["final"], ["0123456789abcdef"])
    broken_anew = Screen(8, 8)
    broken_anew.write("final\r\n01234567\r\n89abcdef")
    screen.columns = 8
    screen.written.clear()
    region.paint([], ["01234567", "89abcdef", "g"])
    broken_anew.write("".join(screen.written))
    assert broken_anew.lines() == ["final", "01234567", "89abcdef", "g"]
