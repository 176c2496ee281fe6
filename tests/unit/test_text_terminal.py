"""The terminal filter: nothing unsafe passes, everything else does, over every split."""

from __future__ import annotations

import random
import unicodedata

import pytest

from corellm.text.terminal import TerminalFilter, terminal_safe

KEPT = (
    "plain text,\n\ttabs and lines",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ❤️ 葛\U000e0100",
    "مرحبا שלום नमस्ते 你好 e\u0301 Zürich a\u00a0b x\u200by",
)


@pytest.mark.parametrize("text", KEPT)
def test_ordinary_text_passes(text: str) -> None:
    assert terminal_safe(text) == text


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x00\x08\x0b\x7f", "␀␈␋␡"),
        ("a\x9b31m", "a<U+009B>31m"),
        ("\u202eevil\u202c", "<U+202E>evil<U+202C>"),
        ("\u061c\u200e\u2066\u2069", "<U+061C><U+200E><U+2066><U+2069>"),
        ("\u2028\ufeff", "<U+2028><U+FEFF>"),
        ("\ud800", "<U+D800>"),
        ("\U000e0041", "<U+E0041>"),
        ("line\r\nline\r\n", "line\nline\n"),
        ("over\rwrite\r\r\n\r", "over␍write␍\n␍"),
    ],
)
def test_unsafe_text_shows(text: str, safe: str) -> None:
    assert terminal_safe(text) == safe
    for cut in range(len(text) + 1):
        for second in range(cut, len(text) + 1):
            stream = TerminalFilter()
            chunks = (text[:cut], text[cut:second], text[second:])
            assert "".join(map(stream.push, chunks)) + stream.flush() == safe


def test_of_all_of_unicode_no_control_passes() -> None:
    bidirectional = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for code in range(0x110000):
        char = chr(code)
        unsafe = (
            unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") and char not in "\n\t"
        ) or unicodedata.bidirectional(char) in bidirectional
        if unsafe:
            assert char not in terminal_safe(char), hex(code)
        elif unicodedata.category(char) not in ("Cf", "Cn", "Co"):
            assert terminal_safe(char) == char, hex(code)


def test_output_needs_no_second_filter() -> None:
    text = "".join(map(chr, range(0x3000))) + "\ud800\U000e0001"
    assert terminal_safe(terminal_safe(text)) == terminal_safe(text)


def test_carriage_return_waits_and_is_shown_once() -> None:
    stream = TerminalFilter()
    assert stream.push("a\r") == "a"
    assert stream.push("") == ""
    assert stream.flush() == "␍"
    assert stream.flush() == ""


# What escape sequences are made of, and what stands around them.
_STARTS = (
    "\x1b[",
    "\x1b]",
    "\x1bP",
    "\x1b_",
    "\x1b^",
    "\x1bX",
    "\x1b(",
    "\x1b#",
    "\x1b",
    "\x9b",
    "\x9d",
    "\x90",
    "\x8f",
)
_ENDS = ("m", "H", "J", "\x07", "\x1b\\", "\x9c", "c", "h", "\r", "\n", "", "\u202e", "\x00", "\x7f", "\x85", "\u2066")
_INNER = "0123456789;?:=! abcxyz$\"'/"
_AROUND = ("plain", "👩‍👩‍👧‍👦", "日本語", "שלום", "e\u0301", "\r\n", "\t", "")


def _payload(source: random.Random) -> str:
    inner = "".join(source.choices(_INNER, k=source.randrange(8)))
    return source.choice(_AROUND) + source.choice(_STARTS) + inner + source.choice(_ENDS) + source.choice(_AROUND)


def test_10_000_escape_sequences_split_anywhere_stay_visible() -> None:
    source = random.Random(2026)
    unsafe = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))} - {"\n", "\t"} | set("\u202e\u2066")
    for _ in range(10_000):
        text = _payload(source)
        whole = terminal_safe(text)
        assert unsafe.isdisjoint(whole)
        for cut in range(len(text) + 1):
            stream = TerminalFilter()
            assert stream.push(text[:cut]) + stream.push(text[cut:]) + stream.flush() == whole
