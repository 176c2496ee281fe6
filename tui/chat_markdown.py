"""Markdown of an answer that is still being written, rendered block by block.

All text is foreign. It has been through the terminal filter when it comes here, but Markdown can spell characters out
(`&#x202E;` is one), so what the parser yields is filtered again, before anything is laid out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.segment import Segment
from rich.syntax import Syntax
from rich.theme import Theme

from corellm.text.terminal import terminal_safe

# Legible on light and dark backgrounds, and without colours.
THEME = Theme(
    {
        "markdown.code": "bold cyan",
        "markdown.block_quote": "italic",
        "markdown.h1": "bold underline",
        "markdown.h2": "bold",
        "markdown.h3": "bold",
        "markdown.h4": "bold italic",
        "markdown.h5": "italic",
        "markdown.h6": "italic",
    }
)

_CODE_INDENT = "  "
_DEEPEST = 20  # quotes and list items that stand in each other
_NEST_COLUMNS = 4  # that each of them takes, at most
_RESET = "\x1b[0m"
_TRAILING = re.compile(r"(?:\x1b\[[0-9;]*m| )+$")
# A last line of which nothing is known yet but how it begins: it may become a list, a heading's underline, a fence.
_UNDECIDED = re.compile(r"[\s>]*(?:[-+*#=_`~|:]*|\d{1,9}[.)]?)\s*")


class _Heading(Heading):
    """At the left, as everything else is."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _CodeBlock(CodeBlock):
    """Without padding at the right or a background, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Syntax("", self.lexer_name, theme=self.theme, word_wrap=True).highlight(str(self.text).rstrip())
        text.rstrip()  # the highlighter ends it with an empty line
        width = max(options.max_width - len(_CODE_INDENT), 1)
        for line in console.render_lines(text, options.update(width=width), pad=False):
            yield Segment(_CODE_INDENT)
            yield from line
            yield Segment.line()


class _Blocks(Markdown):
    """Tokens, rendered. Links show where they lead: an answer could name one place and mean another."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _CodeBlock,
        "code_block": _CodeBlock,
    }

    def __init__(self, tokens: Sequence[Token]) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = list(tokens)


class MarkdownStream:
    """Text in; lines out, with their escapes, as they should stand on the console at its present width.

    A block is finished when another one begins behind it. Its lines are final; those of the open block may change.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 3 * _DEEPEST}).enable(
            ["strikethrough", "table"]
        )
        self._references: dict[str, Any] = {}  # link definitions, which hold for later blocks as well
        self._plain_parser = MarkdownIt("zero")
        self._open = ""
        self._line_ended = False
        self._begun = False

    def push(self, text: str) -> None:
        self._open += text
        self._line_ended = self._line_ended or "\n" in text

    def take_finished(self) -> list[str]:
        """The lines of the blocks that were finished since the last call."""
        if not self._line_ended:
            return []
        self._line_ended = False
        # How a line that goes on begins does not tell yet whether a block begins there.
        whole_lines = self._open[: self._open.rfind("\n") + 1]
        tokens = self._parse(whole_lines)
        starts = [index for index, token in enumerate(tokens) if token.level == 0 and token.nesting >= 0]
        if len(starts) < 2:
            return []
        last = starts[-1]
        begin, _ = tokens[last].map or (0, 0)
        self._open = "\n".join(self._open.split("\n")[begin:])
        lines = self._render(tokens[:last])
        self._begun = True
        return lines

    def open_lines(self) -> list[str]:
        """The lines of the open block as they stand. A last line that could become anything waits."""
        head, newline, tail = self._open.rpartition("\n")
        shown = head if newline and _UNDECIDED.fullmatch(tail) else self._open
        return self._render(self._parse(shown))

    def finish(self) -> list[str]:
        """End the text: the lines of what was open."""
        lines = self._render(self._parse(self._open))
        self._open = ""
        return lines

    def _parse(self, text: str) -> list[Token]:
        tokens = self._parser.parse(text, {"references": self._references})
        # Deeper than this, the parser drops text, or no column is left for it.
        if _nesting(tokens) > min(_DEEPEST, self._console.width // _NEST_COLUMNS - 1):
            tokens = self._plain_parser.parse(text)
        _make_safe(tokens)
        return tokens

    def _render(self, tokens: Sequence[Token]) -> list[str]:
        """One empty line stands before each block but the first of all."""
        lines: list[str] = []
        for block in _split(tokens):
            with self._console.capture() as captured:
                self._console.print(_Blocks(block))
            rendered = _trimmed(captured.get())
            lines += ["", *rendered] if rendered and (self._begun or lines) else rendered
        return lines


def _trimmed(rendered: str) -> list[str]:
    """Lines without the spaces, and the styles between them, that fill them up, and without empty ones at the ends."""
    lines = [
        _TRAILING.sub(lambda padding: _RESET if "\x1b" in padding[0] else "", line) for line in rendered.split("\n")
    ]
    full = [index for index, line in enumerate(lines) if line not in ("", _RESET)]
    return lines[full[0] : full[-1] + 1] if full else []


def _nesting(tokens: Iterable[Token]) -> int:
    """How many quotes and list items stand in each other, at most."""
    depth = deepest = 0
    for token in tokens:
        if token.tag in ("blockquote", "li"):
            depth += token.nesting
            deepest = max(deepest, depth)
    return deepest


def _split(tokens: Sequence[Token]) -> Iterable[Sequence[Token]]:
    """The tokens of each top-level block."""
    begin = 0
    for index, token in enumerate(tokens):
        if token.level == 0 and token.nesting <= 0:
            yield tokens[begin : index + 1]
            begin = index + 1


def _make_safe(tokens: Iterable[Token]) -> None:
    """Filter what the parser decoded; line ends within a paragraph stay, as whoever wrote them meant them."""
    for token in tokens:
        token.content = terminal_safe(token.content)
        token.attrs = {
            name: terminal_safe(value) if isinstance(value, str) else value for name, value in token.attrs.items()
        }
        if token.type == "softbreak":
            token.type = "hardbreak"
        if token.children:
            _make_safe(token.children)
