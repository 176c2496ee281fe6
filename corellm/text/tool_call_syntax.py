"""How a tool call begins and ends in a text that may not be all there yet."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

_WORD = re.compile(r"\w*")
_CALL, _CALL_END = '.call(query="', '")'


class Undecided(Exception):
    """The text may still become what is looked for."""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a call's object: `length` characters, up to the arguments if it has some."""

    name: str
    length: int
    has_arguments: bool


def read_head(text: str, names: Collection[str]) -> Head | None:
    """None if no call begins `text`. Raises `Undecided`."""
    name = None
    place = _after(text, 0, "{")
    while place is not None:
        key, place = _one_of(text, place, ("name", "type", "parameters", "arguments"))
        place = place and _after(text, place, ":")
        if place is None:
            return None
        if key == "name":
            name, place = _one_of(text, place, names)
        elif key == "type":
            _, place = _one_of(text, place, ("function",))
        else:
            return _before_arguments(text, place, name)
        if place is None:
            return None
        if name is not None and text[place:].lstrip().startswith("}"):
            return Head(name, place, has_arguments=False)
        place = _after(text, place, ",")
    return None


def _before_arguments(text: str, place: int, name: str | None) -> Head | None:
    if name is None:
        return None
    if (null := _after(text, place, "null", "{")) is None:
        return None
    if text[null - 1] == "{":
        return Head(name, null - 1, has_arguments=True)
    return Head(name, null, has_arguments=False)


@dataclass(frozen=True, slots=True)
class BuiltInCall:
    name: str
    query: str
    length: int


def read_built_in_call(text: str, names: Collection[str]) -> BuiltInCall | None:
    """`name.call(query="…")` at the beginning of `text`, or None. Raises `Undecided`."""
    word = _WORD.match(text)
    name = word[0] if word else ""
    if len(name) == len(text):
        if any(known.startswith(name) for known in names):
            raise Undecided
        return None
    begin = _after(text, len(name), _CALL) if name in names else None
    if begin is None:
        return None
    end = text.find('"', begin)
    if end < 0:
        raise Undecided
    if _after(text, end, _CALL_END) is None:
        return None
    return BuiltInCall(name, text[begin:end], end + len(_CALL_END))


def _one_of(text: str, place: int, options: Iterable[str]) -> tuple[str, int | None]:
    """The JSON string at `place` that is one of `options`, and where it ends; None if it is another."""
    quoted = {json.dumps(option, ensure_ascii=False): option for option in options}
    end = _after(text, place, *quoted)
    return ("", None) if end is None else (quoted[text[place:end].lstrip()], end)


def _after(text: str, place: int, *options: str) -> int | None:
    """Where that one of `options` ends which follows at `place`, white space aside; None if none does.

    Raises `Undecided` when the text ends before that is known.
    """
    rest = text[place:].lstrip()
    for option in options:
        if rest.startswith(option):
            return len(text) - len(rest) + len(option)
    if any(option.startswith(rest) for option in options):
        raise Undecided
    return None


class JsonScanner:
    """Finds the end of an object that comes in pieces, by its brackets and strings alone."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_string = self._is_escaped = False

    def find_end(self, piece: str) -> int | None:
        """How many characters of `piece` belong to the object; None if it does not end there."""
        for place, char in enumerate(piece, start=1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return place
        return None
