"""The terminal's keyboard while nobody reads it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
from collections.abc import Iterator


@contextlib.contextmanager
def silent_keyboard() -> Iterator[None]:
    """Keys pressed now do not show, and whoever reads next gets them, Enter as Enter. Ctrl-C works.

    Otherwise they would show up in the middle of what is drawn. A process that goes on after Ctrl-Z finds the shell's
    mode and sets this one again. Does nothing where stdin is no terminal. For the main thread.
    """
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    _silence(terminal, termios.TCSADRAIN)

    def go_on(number: int, frame: object) -> None:
        # In the background, changing the terminal would stop us again.
        if os.tcgetpgrp(terminal) == os.getpgrp():
            _silence(terminal, termios.TCSANOW)

    before_stop = signal.signal(signal.SIGCONT, go_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, before_stop)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _silence(terminal: int, when: int) -> None:
    """Change only what is in the way: a line editor that reads just now may have set more."""
    mode = termios.tcgetattr(terminal)
    mode[0] &= ~termios.ICRNL
    mode[3] &= ~(termios.ECHO | termios.ICANON)
    mode[3] |= termios.NOFLSH  # or Ctrl-C would throw away what has been typed
    termios.tcsetattr(terminal, when, mode)
