"""What a run of `corellm chat` is given as text: options, files that they name, a pipe. Bytes are never guessed at."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

from corellm.chat.files import TEXT_BYTES, bounded, named, read_text, text_or_file, utf8
from corellm.errors import ChatError, InvalidRequestError, OptionError
from corellm.openai_api.tools import tools

SILENCE_S = 2.0  # of a pipe, before the user is told what is waited for
_STDIN = "standard input"
_WAITING = f"reading {_STDIN} until it ends; close it, or use </dev/null"


def text_option(flag: str, text: str) -> str:
    """An option's text. Raises `OptionError` if the command line's bytes are not UTF-8."""
    with _refused():
        return utf8(text.encode("utf-8", "surrogateescape"), flag)


def text_or_file_option(flag: str, text: str) -> str:
    """An option's text, or the file's that it names after an `@`. Raises `OptionError`."""
    with _refused(f"{flag}: " if text.startswith("@") else ""):
        return text_or_file(text) if text.startswith("@") else text_option(flag, text)


def tools_option(flag: str, name: str) -> list[dict[str, Any]]:
    """The definitions of tools in the JSON file called `name`. Raises `OptionError`."""
    try:
        with _refused(f"{flag}: "):
            text = read_text(named(name))
        definitions = tools("tools", json.loads(text))
    except (ValueError, RecursionError):
        raise OptionError(f"{flag}: {name} is not JSON; it must be a list as in OpenAI's API") from None
    except InvalidRequestError as error:
        raise OptionError(f"{flag}: {name}: {error.message}") from None
    return [dict(definition) for definition in definitions]


def read_pipe(tell: Callable[[str], object]) -> str | None:
    """What stdin holds; nothing where it is closed. None: it is a terminal.

    `tell` gets a line, from another thread, when nothing comes for a while. Raises `OptionError` for what is no UTF-8.
    """
    if sys.stdin is None:
        return ""
    if sys.stdin.isatty():
        return None
    silence = threading.Timer(SILENCE_S, tell, [_WAITING])
    silence.daemon = True
    silence.start()
    stdin = cast("io.BufferedReader", sys.stdin.buffer)
    try:
        first = stdin.read1()
    finally:
        silence.cancel()
    with _refused():
        return utf8(bounded(first + stdin.read(TEXT_BYTES), TEXT_BYTES, _STDIN), _STDIN)


@contextlib.contextmanager
def _refused(prefix: str = "") -> Iterator[None]:
    """What a chat refuses is wrong with the command line here."""
    try:
        yield
    except ChatError as error:
        raise OptionError(prefix + error.message) from None
