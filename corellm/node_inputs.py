"""What callers hand to `EngineNode`, made plain: prompts, conversations and params, in any iterable that keeps order.

Arrays count as the lists of numbers that they hold. Whatever else comes is refused by `InvalidRequestError`, in one
line that names the argument, what it is and what is allowed. So is text with half of a surrogate pair, which no JSON
can hold either: what such text was meant to be, nobody knows.
"""

from __future__ import annotations

import contextlib
import operator
import reprlib
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NoReturn, SupportsIndex

import msgspec

from corellm.errors import InvalidRequestError
from corellm.sampling_params import SamplingParams

Prompt = str | Iterable[SupportsIndex]
Prompts = Prompt | Iterable[Prompt]
Params = SamplingParams | Iterable[SamplingParams]

_NO_LIST = (str, bytes, bytearray, memoryview, Mapping)  # iterable, but into pieces that nobody meant
_PROMPT = "text or a list of token ids"
_PROMPTS = "text, a list of token ids, or a list of such prompts"
_CONVERSATIONS = "a list of messages, or a list of such lists"
_PARAMS = "SamplingParams, or a list with one for each prompt"


def plain_prompts(given: object) -> list[str | list[int]]:
    """One prompt or several: texts and lists of token ids. The first entry tells ids from prompts."""
    given = _unpacked(given)
    if isinstance(given, str):
        return [_prompt("prompts", given)]
    entries = [_unpacked(entry) for entry in _iterable("prompts", given, _PROMPTS)]
    if entries and _token_id(entries[0]) is not None:
        return [_token_ids("prompts", entries)]
    return [_prompt(f"prompts[{index}]", entry) for index, entry in enumerate(entries)]


def plain_prompt(given: object) -> str | list[int]:
    """Exactly one prompt."""
    return _prompt("prompt", given)


def plain_conversations(given: object) -> list[list[Any]]:
    """One conversation or several. Of their messages only the text is looked at; the prompt format checks the rest."""
    entries = list(_iterable("conversations", given, _CONVERSATIONS))
    if entries and isinstance(entries[0], Mapping):
        check_text("conversations", entries)
        return [entries]
    found = []
    for index, entry in enumerate(entries):
        name = f"conversations[{index}]"
        found.append(list(_iterable(name, entry, "a list of messages")))
        check_text(name, found[-1])
    return found


def params_for(count: int, given: object) -> list[SamplingParams]:
    """The params of each of `count` prompts; None stands for the defaults."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    found = list(islice(_iterable("params", given, _PARAMS), count + 1))  # what it comes from may have no end
    for index, entry in enumerate(found):
        if not isinstance(entry, SamplingParams):
            _refuse(f"params[{index}]", entry, "SamplingParams")
    if len(found) != count:
        entries = len(found) if len(found) < count else f"more than {count}"
        raise InvalidRequestError(
            f"params has {entries} entries for {count} prompts; give one, or one for each", "params"
        )
    return found


def check_text(name: str, value: object) -> None:
    """Refuse half of a surrogate pair in any string of a JSON value, which may hold itself."""
    rest, seen = [value], set[int]()
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequestError(
                    f"{name} holds {item[error.start]!a}, half of a surrogate pair, at character {error.start} of a "
                    "text; give the whole character, or none",
                    name,
                ) from None
        elif isinstance(item, Mapping | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            rest += (*item, *item.values()) if isinstance(item, Mapping) else item


def _prompt(name: str, given: object) -> str | list[int]:
    given = _unpacked(given)
    if isinstance(given, str):
        check_text(name, given)
        return given
    return _token_ids(name, _iterable(name, given, _PROMPT))


def _token_ids(name: str, entries: Iterable[object]) -> list[int]:
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(entries, list[int])  # nearly always; 20 times as fast as to look at each
    ids = []
    for index, entry in enumerate(entries):
        token = _token_id(entry)
        if token is None:
            _refuse(f"{name}[{index}]", entry, "an integer, as token ids are")
        ids.append(token)
    return ids


def _token_id(entry: object) -> int | None:
    """None for what is no integer; True and False are none."""
    if isinstance(entry, bool):
        return None
    try:
        return operator.index(entry)  # type: ignore[arg-type]  # whether it can be one is the question
    except TypeError:
        return None


def _unpacked(value: object) -> object:
    """The plain lists and numbers in an array, of whatever library: it need not be imported to know."""
    unpack = None if type(value) in (int, str, list) else getattr(value, "tolist", None)
    return unpack() if callable(unpack) and not isinstance(value, memoryview) else value


def _iterable(name: str, value: object, allowed: str) -> Iterable[Any]:
    if isinstance(value, _NO_LIST) or not isinstance(value, Iterable):
        _refuse(name, value, allowed)
    return value


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    try:
        found = " ".join(reprlib.repr(value).split())  # the repr of an array has lines
    except ValueError:  # Python does not print integers of thousands of digits
        found = f"of type {type(value).__name__}"
    raise InvalidRequestError(f"{name} is {found}; it must be {allowed}", name)
