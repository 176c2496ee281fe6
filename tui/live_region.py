"""Lines at the bottom of a terminal that may still change, below lines that never will."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.cells import cell_len

_STYLES = re.compile(r"\x1b\[[0-9;]*m")
# Terminals that know "synchronized output" show what is between in one go; others ignore it.
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"


class LiveRegion:
    """Paints by one write, from the first line that changed on, so that nothing flickers.

    `size` gives (columns, rows) of the terminal. The cursor stands at the end of the last live line, or at the start of
    an empty row if there is none. A line that does not fit above the bottom of the terminal can not be reached again:
    it becomes final as it stands, and `paint` says how many did.
    """

    def __init__(self, write: Callable[[str], object], size: Callable[[], tuple[int, int]]) -> None:
        self._write, self._size = write, size
        self._shown: list[str] = []
        self._columns = size()[0]

    def paint(self, final: Sequence[str], live: Sequence[str]) -> int:
        """Show `final` for good and `live` below, in place of what was live. Returns how many of `live` became final.

        Lines may have styles, and are no wider than the terminal.
        """
        columns, rows = self._size()
        frozen = max(len(live) - max(rows - 1, 1), 0)
        wanted = [*final, *live]
        change = "" if wanted == self._shown and columns == self._columns else self._change(wanted, columns, rows)
        if final and not live:
            change += "\r\n"
        if change:
            self._write(f"{_BEGIN}{change}{_END}")
        self._shown = list(live[frozen:])
        self._columns = columns
        return frozen

    def _change(self, wanted: Sequence[str], columns: int, rows: int) -> str:
        """What turns the lines shown into `wanted`."""
        shown = self._shown
        if not shown:
            return "\r\n".join(wanted)
        if columns != self._columns:
            # Terminals break lines anew when they are resized: count the rows that ours take now.
            up = min(sum(max(1, -(-_width(line) // columns)) for line in shown) - 1, rows - 1)
            return _rewrite(up, wanted)
        same = 0
        while same < min(len(shown), len(wanted)) and shown[same] == wanted[same]:
            same += 1
        if same == len(shown):
            return "\r\n" + "\r\n".join(wanted[same:])
        same = max(min(same, len(wanted) - 1), 0)
        return _rewrite(len(shown) - 1 - same, wanted[same:])


def _rewrite(up: int, lines: Sequence[str]) -> str:
    """Go `up` rows, erase from there to the end of the screen, and write."""
    climb = f"\x1b[{up}A" if up else ""
    return f"{climb}\r\x1b[J" + "\r\n".join(lines)


def _width(line: str) -> int:
    return cell_len(_STYLES.sub("", line))
