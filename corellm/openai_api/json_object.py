"""JSON objects that others wrote: a row of a batch, the body of a request."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from corellm.openai_api.kinds import shown

_BYTE = re.compile(r"\(byte (\d+)\)")
# Every escape of a text in turn. The group is a half of a pair that stands alone, which pairs are tried before.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(u[dD][89a-fA-F][\da-fA-F]{2})|.)", re.DOTALL
)


class NotAnObjectError(ValueError):
    """Why bytes are no JSON object, in one line."""


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """The object that `data` spells out. Raises `NotAnObjectError`, which calls it `what`."""
    try:
        text = data.decode("utf-8")
        value = msgspec.json.decode(text)
    except UnicodeDecodeError as error:
        raise NotAnObjectError(f"{what} is not UTF-8 at byte {error.start}; write it as UTF-8") from None
    except RecursionError:
        raise NotAnObjectError(f"{what} is nested too deeply; a request needs few levels") from None
    except msgspec.DecodeError as error:
        if not text.strip():
            raise NotAnObjectError(f"{what} is empty; it must be a JSON object") from None
        raise NotAnObjectError(f"{what} is not JSON: {_fault(text, str(error))}") from None
    if not isinstance(value, dict):
        raise NotAnObjectError(f"{what} holds {shown(value)}; it must be a JSON object")
    return value


_LONGEST_ESCAPE = 6  # bytes


def _fault(text: str, reason: str) -> str:
    """Where the text stops being JSON. The decoder's own reasons do not always name the right fault."""
    position = _BYTE.search(reason)
    if position is not None:  # what stands behind it does not matter, and may be long
        text = text.encode()[: int(position[1]) + _LONGEST_ESCAPE].decode(errors="ignore")
    half = next((escape for escape in _ESCAPE.finditer(text) if escape[1]), None)
    if half is not None:
        byte = len(text[: half.start()].encode())
        if position is None or byte <= int(position[1]):
            return f"it holds {half[0]} at byte {byte}, half of a surrogate pair; escape the whole character, or none"
    if position is not None:
        return f"it goes wrong at byte {position[1]}"
    return "it holds a number out of range" if "out of range" in reason else "it is cut off"
