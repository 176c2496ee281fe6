"""Where an answer goes while it is generated: Markdown on a terminal, plain text elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from rich.console import Console

from corellm.text.terminal import TerminalFilter

from .chat_markdown import MarkdownStream
from .live_region import LiveRegion

PAINT_S = 0.06  # between two paints, at least
_REST = 5  # times as long as a paint took, at least, nothing is painted: at most a sixth of one core
_WAITING = "…"


class AnswerView(Protocol):
    """Shows one answer."""

    def push(self, text: str) -> None: ...
    def finish(self) -> None: ...
    async def keep_painting(self) -> None:
        """Paint for as long as the task runs."""
        ...


class MarkdownAnswer:
    """Markdown as it arrives. `console` is a terminal; `clock` reads seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self._console, self._clock = console, clock
        self._filter = TerminalFilter()
        self._stream = MarkdownStream(console)
        self._region = LiveRegion(self._write, lambda: (console.width, console.height))
        self._frozen = 0  # lines of the open block that have scrolled out of reach
        self._frozen_characters = 0
        self._columns = console.width
        self._dirty = True
        self._empty = True

    def push(self, text: str) -> None:
        safe = self._filter.push(text)
        self._empty = self._empty and not safe.strip()
        self._stream.push(safe)
        self._dirty = True

    def paint(self) -> None:
        """Bring the screen up to date."""
        if not self._dirty and self._columns == self._console.width:
            return
        self._dirty = False
        final = self._take_finished()
        self._show(final, [_WAITING] if self._empty else self._unfrozen(self._stream.open_lines()))

    def finish(self) -> None:
        """Show all of it for good."""
        self._stream.push(self._filter.flush())
        final = self._take_finished()
        self._show([*final, *self._unfrozen(self._stream.finish())], [])

    async def keep_painting(self) -> None:
        while True:
            began = self._clock()
            self.paint()
            await asyncio.sleep(max(PAINT_S, _REST * (self._clock() - began)))

    def _show(self, final: list[str], live: list[str]) -> None:
        frozen = self._region.paint(final, live)
        self._frozen += frozen
        self._frozen_characters += sum(map(_characters, live[:frozen]))

    def _take_finished(self) -> list[str]:
        finished = self._stream.take_finished()
        if not finished:
            return []
        final = self._unfrozen(finished)
        self._frozen = self._frozen_characters = 0
        return final

    def _unfrozen(self, lines: list[str]) -> list[str]:
        """The lines of the open block that can still be reached."""
        if self._columns != self._console.width:
            self._columns = self._console.width
            # At another width other lines hold what was frozen: those that have as many characters.
            self._frozen = characters = 0
            while self._frozen < len(lines) and characters < self._frozen_characters:
                characters += _characters(lines[self._frozen])
                self._frozen += 1
        return lines[self._frozen :]

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


class PlainAnswer:
    """Text as it comes: raw into files and pipes, filtered onto a terminal."""

    def __init__(self, file: TextIO, *, terminal: bool) -> None:
        self._file = file
        self._filter = TerminalFilter() if terminal else None
        self._ends_line = True

    def push(self, text: str) -> None:
        self._put(text if self._filter is None else self._filter.push(text))

    def finish(self) -> None:
        """End the last line, if the answer did not."""
        self._put("" if self._filter is None else self._filter.flush())
        self._put("" if self._ends_line else "\n")

    async def keep_painting(self) -> None:
        await asyncio.get_running_loop().create_future()

    def _put(self, text: str) -> None:
        if text:
            self._ends_line = text.endswith("\n")
            self._file.write(text)
            self._file.flush()


def _characters(line: str) -> int:
    return len(line) - line.count(" ")
