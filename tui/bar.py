"""A progress bar of one line."""

from __future__ import annotations

from rich.text import Text


def bar(done: int, total: int, cells: int) -> Text:
    """`cells` wide; full and empty differ in glyph as well as in colour, which a terminal may not have."""
    filled = cells * min(done, total) // total
    return Text("━" * filled, "cyan").append("╌" * (cells - filled), "bright_black")
