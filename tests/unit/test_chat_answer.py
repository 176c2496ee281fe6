"""Where answers go: a terminal gets Markdown or filtered text, files and pipes get what the model wrote."""

from __future__ import annotations

import asyncio
import io
import time

import pytest
from rich.console import Console

from corellm_tui.chat_answer import PAINT_S, MarkdownAnswer, PlainAnswer
from corellm_tui.chat_markdown import THEME

WRITES_A_PAINT = 2
HOSTILE = ["over\r", "write\x1b", "]0;title\x07 \u202e", "\x9b31m\r", "\nend"]


class Paper(io.StringIO):
    """A file that counts its writes."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


def markdown_answer(paper: Paper) -> MarkdownAnswer:
    return MarkdownAnswer(Console(file=paper, force_terminal=True, width=60, height=20, theme=THEME))


def test_files_and_pipes_get_every_character() -> None:
    paper = io.StringIO()
    answer = PlainAnswer(paper, terminal=False)
    for text in HOSTILE:
        answer.push(text)
    answer.finish()
    assert paper.getvalue() == "".join(HOSTILE) + "\n"


def test_a_terminal_gets_filtered_text() -> None:
    paper = io.StringIO()
    answer = PlainAnswer(paper, terminal=True)
    for text in HOSTILE:
        answer.push(text)
    answer.finish()
    assert paper.getvalue() == "over␍write␛]0;title␇ <U+202E><U+009B>31m\nend\n"


@pytest.mark.parametrize(("text", "written"), [("x\n", "x\n"), ("x", "x\n"), ("", "")])
def test_the_last_line_ends_once(text: str, written: str) -> None:
    paper = io.StringIO()
    answer = PlainAnswer(paper, terminal=False)
    answer.push(text)
    answer.finish()
    assert paper.getvalue() == written


def test_markdown_is_filtered_before_it_is_read() -> None:
    paper = Paper()
    answer = markdown_answer(paper)
    for text in HOSTILE:
        answer.push(text)
        answer.paint()
    answer.finish()
    shown = paper.getvalue()
    assert "over␍write␛]0;title␇ <U+202E><U+009B>31m" in shown  # a lone \r is no line end here
    assert "\x1b]" not in shown
    assert "\x07" not in shown


def test_painting_waits_for_text_and_paints_by_the_clock() -> None:
    paper = Paper()
    answer = markdown_answer(paper)

    async def run() -> None:
        painting = asyncio.create_task(answer.keep_painting())
        began = time.monotonic()
        for _ in range(100):  # one piece every millisecond: the screen changes far less often
            answer.push("x")
            await asyncio.sleep(0.001)
        paints = 1 + (time.monotonic() - began) / PAINT_S
        assert 1 <= paper.writes <= WRITES_A_PAINT * paints
        deadline, settled = time.monotonic() + 10, 0
        while paper.writes != settled:  # nothing more comes, so nothing more is painted
            assert time.monotonic() < deadline, "10 s after the last piece it still paints"
            settled = paper.writes
            await asyncio.sleep(3 * PAINT_S)
        painting.cancel()

    asyncio.run(run())


def test_nothing_is_left_of_an_answer_without_text() -> None:
    paper = Paper()
    answer = markdown_answer(paper)
    answer.paint()
    assert "…" in paper.getvalue()
    answer.finish()
    assert paper.getvalue().endswith("\r\x1b[J\x1b[?2026l")
