"""Markdown that arrives in pieces: what is shown in the end, what is final on the way, what never reaches a screen."""

from __future__ import annotations

import io
import random
import re

import pytest
from rich.console import Console

from corellm.text.terminal import terminal_safe
from corellm_tui.chat_markdown import THEME, MarkdownStream

STYLES = re.compile(r"\x1b\[[0-9;]*m")
TEXT = """# Title

A paragraph with **bold**, `code` and a [link](https://example.org/x).
A second line of it.

1. first
2. second
   - below

> quoted

| a | b |
|---|---|
| 1 | 2 |

```python
def f(x):
    return x  # comment
```

***

<b>No</b> HTML & an end.
"""

# Pieces of Markdown that, put together at random, make what no parser should trip over.
ATOMS = (
    "# ", "\n", "\n\n", "- ", "1. ", "> ", "```", "```python\n", "~~~", "**", "_", "`", "[a](", "http://x)", "![i](u)",
    "|", "| a | b |\n", "|-|-|\n", "---", "===", "    ", "\t", "&#x202E;", "&#27;", "<b>", "<!--", "\\", "word ",
    "日本", "👩‍👩‍👧", "é", "~~", "![](", "1)", "\u200b", "[", "]", ">" * 30,
)  # fmt: skip


def console(columns: int = 80) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", width=columns, height=24, theme=THEME
    )


def plain(lines: list[str]) -> list[str]:
    return [STYLES.sub("", line).rstrip() for line in lines]


def in_pieces(text: str, columns: int, sizes: random.Random) -> list[str]:
    """The final lines, as the screen has them in the end; the open block is rendered after every piece."""
    stream = MarkdownStream(console(columns))
    lines: list[str] = []
    while text:
        size = sizes.randint(1, 9)
        stream.push(text[:size])
        lines += stream.take_finished()
        stream.open_lines()
        text = text[size:]
    return lines + stream.finish()


def at_once(text: str, columns: int) -> list[str]:
    stream = MarkdownStream(console(columns))
    stream.push(text)
    return stream.finish()


def test_every_kind_of_block() -> None:
    assert plain(at_once(TEXT, 60)) == [
        "Title",
        "",
        "A paragraph with bold, code and a link",
        "(https://example.org/x).",
        "A second line of it.",
        "",
        " 1 first",
        " 2 second",
        "    • below",
        "",
        "▌ quoted",
        "",
        " a  b",
        " ────",
        " 1  2",
        "",
        "  def f(x):",
        "      return x  # comment",
        "",
        "-" * 60,
        "",
        "<b>No</b> HTML & an end.",
    ]


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_pieces_give_the_lines_of_the_whole(columns: int) -> None:
    whole = at_once(TEXT, columns)
    for seed in range(3):
        assert in_pieces(TEXT, columns, random.Random(seed)) == whole


def test_a_block_is_final_when_the_next_one_has_begun() -> None:
    stream = MarkdownStream(console())
    stream.push("one\n\n```\ncode\n")
    assert plain(stream.take_finished()) == ["one"]
    assert plain(stream.open_lines()) == ["", "  code"]
    stream.push("more\n```\n\nlast")
    assert stream.take_finished() == []  # how the last line goes on decides what it is
    stream.push("\n")
    assert plain(stream.take_finished()) == ["", "  code", "  more"]
    assert plain(stream.finish()) == ["", "last"]


@pytest.mark.parametrize("tail", ["-", "=", "1.", "* ", "```", "|", "> -"])
def test_a_line_that_may_become_anything_waits(tail: str) -> None:
    stream = MarkdownStream(console())
    stream.push(f"a paragraph\n{tail}")
    assert plain(stream.open_lines()) == ["a paragraph"]


def test_random_markdown_breaks_nothing_and_no_control_character_passes() -> None:
    for seed in range(60):
        source = random.Random(seed)
        text = "".join(source.choice(ATOMS) for _ in range(source.randint(1, 40)))
        columns = source.choice([1, 2, 5, 20, 40, 80])
        shown = STYLES.sub("", "\n".join(in_pieces(text, columns, source)))
        assert terminal_safe(shown) == shown, (seed, text)


@pytest.mark.parametrize("depth", [3, 9, 15, 25, 200])
@pytest.mark.parametrize("columns", [20, 40, 80])
def test_deep_nesting_loses_no_text(depth: int, columns: int) -> None:
    for text in ("> " * depth + "deep", "".join(f"{'  ' * level}- {level}\n" for level in range(depth)) + "\ndeep"):
        assert "deep" in "".join("".join(plain(at_once(text, columns))).replace("▌ ", "").split())


def test_a_link_shows_where_it_leads_and_is_no_hyperlink() -> None:
    lines = at_once("[your bank](https://evil.example)", 80)
    assert plain(lines) == ["your bank (https://evil.example)"]
    assert "\x1b]8" not in "".join(lines)


def test_lines_end_without_padding() -> None:
    for line in at_once(TEXT, 80):
        assert not STYLES.sub("", line).endswith(" ")


def test_definitions_of_links_hold_for_later_blocks() -> None:
    stream = MarkdownStream(console())
    stream.push("[x]: https://example.org\n\none\n\ntwo [x]\n\n")
    assert "https://example.org" in "".join(plain([*stream.take_finished(), *stream.finish()]))
