"""Lines of styled text, the one form in which every panel is drawn: on the screen, in `--once` and in tests.

A span is a text and a role; what a role looks like is the theme's affair (`top_palette`). No text here is ever markup.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from .foreign import one_line


class Span(NamedTuple):
    """A text in one style. `ground` is the role of what is behind it."""

    text: str
    role: str = "text"
    ground: str = ""


Line = list[Span]


def foreign(text: str, role: str = "text") -> Span:
    """A span of text that others wrote."""
    return Span(one_line(text), role)


def width(line: Iterable[Span]) -> int:
    """Cells that the line takes."""
    return sum(cell_len(span.text) for span in line)


def fit(line: Line, cells: int) -> Line:
    """The line cut or padded to exactly `cells` cells."""
    fitted: Line = []
    left = cells
    for span in line:
        size = cell_len(span.text)
        if size >= left:
            fitted.append(span._replace(text=set_cell_size(span.text, left)))
            return fitted
        fitted.append(span)
        left -= size
    fitted.append(Span(" " * left))
    return fitted


def spread(left: Line, right: Line, cells: int) -> Line:
    """`left` and `right` at the ends of a line; where there is no room for both, `right` gives way."""
    gap = cells - width(left) - width(right)
    return fit(left, cells) if gap < 1 else [*left, Span(" " * gap), *right]


def rule(title: str, note: Line, cells: int) -> Line:
    """A panel's first line: its title, a rule, and what stands at the right end."""
    head = [Span(title, "title"), Span(" ")]
    end = [Span(" "), *note] if note else []
    room = cells - width(head) - width(end)
    if room < 2:
        return fit([*head, *note], cells)
    return [*head, Span("─" * room, "dim"), *end]


# (role, ground) -> signs for those that only their colour tells from others.
_COLOURLESS = {
    ("prefill", ""): str.maketrans("▁▂▃▄▅▆▇█", "░░░▒▒▒▒▒"),
    ("decode", "prefill"): str.maketrans("▁▂▃▄▅▆▇", "▒▒▒████"),
    ("shared", ""): str.maketrans("█", "◆"),
    ("cached", ""): str.maketrans("█", "□"),
}


def colourless(line: Line) -> Line:
    """The line with bars whose parts differ where there are no colours."""
    return [span._replace(text=span.text.translate(_COLOURLESS.get(span[1:], {}))) for span in line]


def plain(line: Line) -> str:
    """The text alone."""
    return "".join(span.text for span in colourless(line)).rstrip()


def wrapped(words: str, cells: int, role: str = "text") -> list[Line]:
    """A paragraph, broken between words."""
    return [[Span(text, role)] for text in textwrap.wrap(words, max(cells, 8), break_on_hyphens=False)]
