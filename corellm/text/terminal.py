"""Make untrusted text harmless to a terminal: what it could do unseen becomes visible."""

from __future__ import annotations

import re

# C0 but tab and newline, DEL and C1; bidirectional marks, embeddings, overrides and isolates; line and paragraph
# separators; deprecated format controls; BOM; interlinear annotations; lone surrogates; tag characters.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


class TerminalFilter:
    """Filter of one stream. Whatever the chunks, the pieces joined are `terminal_safe` of the whole text.

    `\\r\\n` becomes `\\n`. Control characters become their pictures (ESC is `␛`), other unsafe ones their number
    (`<U+202E>`). All else passes unchanged: emoji sequences, combining marks, CJK, right-to-left letters.
    """

    def __init__(self) -> None:
        self._carriage_return = False  # held back until the next character tells a line end from a lone one

    def push(self, text: str) -> str:
        """The visible form of `text`; a `\\r` at its end waits for what follows."""
        if self._carriage_return and text:
            text = "\r" + text
        elif not text:
            return ""
        self._carriage_return = text.endswith("\r")
        if self._carriage_return:
            text = text[:-1]
        return _visible(text)

    def flush(self) -> str:
        """End the stream: a `\\r` that waits is shown."""
        held, self._carriage_return = self._carriage_return, False
        return _visible("\r") if held else ""


def terminal_safe(text: str) -> str:
    """`text` as it may be written to a terminal."""
    return _visible(text)


def _visible(text: str) -> str:
    return _UNSAFE.sub(_picture, text.replace("\r\n", "\n"))


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"<U+{code:04X}>"
