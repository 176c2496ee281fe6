"""Make the README's picture of a chat: a real session with the demo model, on a pseudo-terminal.

    python -m docs.chat_screenshot

The session is short, at temperature 0 and on a CPU, so that anyone can run it and get the same answers.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyte
from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tests.support.terminal import terminal

PICTURE = Path(__file__).parent / "images" / "chat.svg"
COLUMNS, ROWS = 96, 32
OPTIONS = ("--model", "demo", "--device", "cpu", "--temperature", "0", "--date", "none", "--new-engine")
MESSAGES = (
    "Write a Python function that checks whether a number is even, with a short explanation.",
    "What is the capital of France?",
    "/set temperature 0.4",
)
_DIM, _GREY = b"\x1b[2m", b"\x1b[90m"  # the emulator knows no dim text


def record() -> bytes:
    """What the program writes while the session is held."""
    with tempfile.TemporaryDirectory() as folder:
        env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        env |= {"TERM": "xterm-256color", "XDG_STATE_HOME": folder}
        command = [str(Path(sys.executable).with_name("corellm")), "chat", *OPTIONS]
        with terminal(command, env, columns=COLUMNS, rows=ROWS) as screen:
            screen.wait_for("/help lists the commands")
            for message in MESSAGES:
                screen.settle()
                turns = screen.text().count("TTFT")
                screen.send(f"{message}\r")
                while not message.startswith("/") and screen.text().count("TTFT") == turns:
                    screen.settle()
            screen.settle()
            return screen.output


def as_text(output: bytes) -> Text:
    """The screen at the end of `output`."""
    screen = pyte.Screen(COLUMNS, ROWS)
    pyte.ByteStream(screen).feed(output.replace(_DIM, _GREY))
    rows = [[screen.buffer[row][column] for column in range(COLUMNS)] for row in range(ROWS)]
    lines = [Text.assemble(*_runs(row)) for row in rows]
    for line in lines:
        line.rstrip()
    while lines and not lines[-1].plain:
        lines.pop()
    return Text("\n").join(lines)


def _runs(row: Iterable[Char]) -> Iterator[tuple[str, Style]]:
    """Stretches of one style."""
    for style, chars in itertools.groupby(row, key=_style):
        yield "".join(char.data for char in chars), style


def _style(char: Char) -> Style:
    return Style(
        color=_color(char.fg), bgcolor=_color(char.bg), bold=char.bold, italic=char.italics, underline=char.underscore
    )


def _color(name: str) -> str | None:
    """The emulator's name of a colour, as Rich has it."""
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return name.replace("bright", "bright_").replace("brown", "yellow")


def main() -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(as_text(record()))
    PICTURE.parent.mkdir(exist_ok=True)
    console.save_svg(str(PICTURE), title="corellm chat")
    print(PICTURE)


if __name__ == "__main__":
    main()
