"""JSON objects that others wrote: a row of a batch, the body of a request."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from corellm.openai_api.kinds import shown

_BYTE = re.compile(r"\(byte (\d+)\)")


class NotAnObjectError(ValueError):
    """Why bytes are no JSON object, in one line."""


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """The object that `data` spells out. Raises `NotAnObjectError`, which calls it `what`."""
    try:
        value = msgspec.json.decode(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise NotAnObjectError(f"{what} is not UTF-8 at byte {error.start}; write it as UTF-8") from None
    except RecursionError:
        raise NotAnObjectError(f"{what} is nested too deeply; a request needs few levels") from None
    except msgspec.DecodeError as error:
        raise NotAnObjectError(f"{what} is not JSON: {_fault(str(error))}") from None
    if not isinstance(value, dict):
        raise NotAnObjectError(f"{what} holds {shown(value)}; it must be a JSON object")
    return value


def _fault(reason: str) -> str:
    """Where the text stops being JSON. The decoder's own reasons do not always name the right fault."""
    position = _BYTE.search(reason)
    return f"it goes wrong at byte {position[1]}" if position else "it is cut off, or holds a number out of range"
