"""Text that others wrote, made fit for one line of a terminal."""

from __future__ import annotations

from corellm.text.terminal import terminal_safe


def one_line(text: str) -> str:
    """`text` with nothing in it that moves the cursor or changes the terminal; line ends and tabs become visible."""
    return terminal_safe(text).replace("\n", "␊").replace("\t", "␉")
