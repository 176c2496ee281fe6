"""What it costs to render an answer as it arrives: CPU time of one core, bytes written, rows rewritten.

    python -m benchmarks.chat_rendering [--rate 300] [--seconds 20] [--columns 100]

The text is Markdown with long paragraphs, lists, a table and a code block taller than the screen; a token is four
characters. The terminal is an emulator that gets what was written after the measurement. Counted as well: feeding the
tokens, which in a chat is receiving them.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import re
import statistics
import time

from rich.console import Console

from benchmarks.report import record
from corellm_tui.chat_answer import MarkdownAnswer
from corellm_tui.chat_markdown import THEME

_TOKEN = 4  # characters
_TICK_S = 0.01

_PARAGRAPH = (
    "The **scheduler** mixes `prefill` and `decode` in one forward pass, within a budget of tokens: *first* every "
    "running sequence decodes one token, then prefills in progress continue, in chunks, while slots and blocks last. "
)
_BLOCKS = (
    "## A heading\n\n",
    _PARAGRAPH * 4 + "\n\n",
    "".join(f"- point {number}: {_PARAGRAPH[:90]}\n" for number in range(12)) + "\n",
    "| name | value | unit |\n|---|---:|---|\n"
    + "".join(f"| row {n} | {n * n} | tokens |\n" for n in range(15))
    + "\n",
    "```python\n"
    + "".join(f"def function_{n}(x: int) -> int:\n    return x * {n}  # comment\n\n" for n in range(30))
    + "```\n\n",
    "> " + _PARAGRAPH + "\n\n",
)


class _Sink(io.StringIO):
    """Keeps each write apart: the answer is painted by one write a paint."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)


async def _stream(view: MarkdownAnswer, rate: float, seconds: float) -> int:
    """Feed tokens at `rate` a second; returns how many."""
    text = "".join(itertools.islice(itertools.cycle(_BLOCKS), 200))
    began, fed = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        due = int(elapsed * rate)
        if due > fed:
            view.push(text[fed * _TOKEN % len(text) :][: (due - fed) * _TOKEN])
            fed = due
        await asyncio.sleep(_TICK_S)
    return fed


async def _measure(rate: float, seconds: float, columns: int) -> dict[str, float]:
    sink = _Sink()
    console = Console(file=sink, force_terminal=True, color_system="truecolor", width=columns, height=40, theme=THEME)
    view = MarkdownAnswer(console)
    painting = asyncio.create_task(view.keep_painting())
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = await _stream(view, rate, seconds)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    painting.cancel()
    paints = [text for text in sink.writes if text]
    rows = sorted(1 + text.count("\n") for text in paints)
    return {
        "tokens_per_s": tokens / wall,
        "cpu_share_of_one_core": cpu / wall,
        "paints_per_s": len(paints) / wall,
        "bytes_per_s": sum(len(text.encode()) for text in paints) / wall,
        "rows_per_paint_p50": statistics.median(rows),
        "rows_per_paint_max": rows[-1],
        "paints_that_erase_the_screen": sum(bool(re.search(r"\x1b\[2J|\x1b\[H", text)) for text in paints),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=300, help="tokens a second")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--columns", type=int, nargs="+", default=[40, 100, 200])
    options = parser.parse_args()
    figures = {
        str(columns): asyncio.run(_measure(options.rate, options.seconds, columns)) for columns in options.columns
    }
    print(json.dumps(figures, indent=1))
    print(record("chat_rendering", {"rate": options.rate, "seconds": options.seconds, "columns": figures}))


if __name__ == "__main__":
    main()
