"""The terminal's keyboard while nobody reads it."""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Iterator


@contextlib.contextmanager
def silent_keyboard() -> Iterator[None]:
    """Keys pressed now do not show, and whoever reads next gets them, Enter as Enter. Ctrl-C works.

    Otherwise they would show up in the middle of what is drawn. Does nothing where stdin is no terminal.
    """
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = termios.tcgetattr(terminal)
    silent[0] &= ~termios.ICRNL
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    silent[3] |= termios.NOFLSH  # or Ctrl-C would throw away what has been typed
    termios.tcsetattr(terminal, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
