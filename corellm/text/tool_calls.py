r"""Find the tool calls in what Llama 3.1 writes, as it is written.

The forms, any of them also after some text:

    {"name": "weather", "parameters": {"city": "Rome"}}     several in a row, or with ; between them
    <|python_tag|>{"name": …}                               the same
    <|python_tag|>brave_search.call(query="…")              a built-in tool
    <|python_tag|>print(6 * 7)                              Python, for the built-in code_interpreter

Only declared names are calls, and an object only where a line begins: everything else is the answer's text. An object
is a call as soon as its name is there and its parameters begin; these are passed on letter by letter from then on.
What can still become a call is held back, and no more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from corellm.text.tool_call_syntax import JsonScanner, Undecided, read_built_in_call, read_head

PYTHON_TAG = "<|python_tag|>"
CODE_INTERPRETER = "code_interpreter"

_SEPARATOR = re.compile(r"\s*;?\s*")


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call number `index`: its name, which comes first and once, or more of its arguments' JSON text."""

    index: int
    name: str | None
    arguments: str = ""


Piece = str | CallDelta


class ToolCallParser:
    """Splits one answer into text and calls. However the answer is cut, the joined pieces are the same.

    `names` are those of the declared tools. Unless `parallel`, nothing after the first call is passed on. `calls`
    counts those that have begun.
    """

    def __init__(self, names: Collection[str], *, parallel: bool = True) -> None:
        self.calls = 0
        self._names = frozenset(names)
        self._parallel = parallel
        self._buffer = ""
        self._skipped = 0  # characters at its front that are text only if what follows them is no call
        self._is_blank = True  # nothing but white space so far
        self._json = JsonScanner()
        self._state: Callable[[bool], bool] = self._read_text
        self._pieces: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        """What `text` brings, in order."""
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Piece]:
        """The answer has ended: what was held back."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Piece]:
        while self._state(final):
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    # ---- states: each takes what it can off the buffer, and says whether the next state can go on -----------------

    def _read_text(self, final: bool) -> bool:
        place = self._find_beginning()
        if place is None:
            self._tell(self._take(len(self._buffer) if final else _certain(self._buffer)))
            return False
        self._tell(self._take(len(self._buffer[:place].rstrip())))
        self._skipped = len(self._buffer) - len(self._buffer.lstrip())
        if self._buffer.startswith(PYTHON_TAG, self._skipped):
            self._buffer = self._buffer[: self._skipped] + self._buffer[self._skipped + len(PYTHON_TAG) :]
            self._state = self._read_tagged
        else:
            self._state = self._read_head
        return True

    def _read_head(self, final: bool) -> bool:
        """Behind what is skipped an object begins."""
        try:
            head = read_head(self._buffer[self._skipped :], self._names)
        except Undecided:
            if not final:
                return False
            head = None
        if head is None:
            self._give_up(more=1)
            return True
        self._take(self._skipped + head.length)
        self._begin(head.name)
        self._json = JsonScanner()
        self._state = self._read_arguments
        if not head.has_arguments:
            self._pass_on("{}")
            self._to_rest()
        return True

    def _read_arguments(self, final: bool) -> bool:
        end = self._json.find_end(self._buffer)
        self._pass_on(self._take(len(self._buffer) if end is None else end))
        if end is not None:
            self._to_rest()
        return end is not None

    def _to_rest(self) -> None:
        self._json.depth = 1  # in the object around the arguments
        self._state = self._read_rest

    def _read_rest(self, final: bool) -> bool:
        """What stands between the arguments and the end of the object around them."""
        end = self._json.find_end(self._buffer)
        self._take(len(self._buffer) if end is None else end)
        if end is not None:
            self._state = self._read_on if self._parallel else self._drop
        return end is not None

    def _read_on(self, final: bool) -> bool:
        """After a call: another one, or text."""
        separator = _SEPARATOR.match(self._buffer)
        self._skipped = separator.end() if separator else 0
        rest = self._buffer[self._skipped :]
        if rest.startswith("{"):
            self._state = self._read_head
        elif rest.startswith(PYTHON_TAG):
            self._take(self._skipped + len(PYTHON_TAG))
            self._state = self._read_tagged
        elif PYTHON_TAG.startswith(rest) and not (final and rest):
            return False  # a separator with nothing after it is not text
        else:
            self._give_up()
        return True

    def _read_tagged(self, final: bool) -> bool:
        """Behind a tag."""
        rest = self._buffer.lstrip()
        self._skipped = len(self._buffer) - len(rest)
        if rest.startswith("{"):
            self._state = self._read_head
            return True
        try:
            call = read_built_in_call(rest, self._names)
        except Undecided:
            if not final:
                return False
            call = None
        if call is not None:
            self._take(self._skipped + call.length)
            self._begin(call.name)
            self._pass_on(json.dumps({"query": call.query}, ensure_ascii=False))
            self._state = self._read_on if self._parallel else self._drop
        elif rest and CODE_INTERPRETER in self._names:
            self._take(self._skipped)
            self._begin(CODE_INTERPRETER)
            self._pass_on('{"code": "')
            self._state = self._read_code
        else:
            self._give_up()
        return True

    def _read_code(self, final: bool) -> bool:
        """Python goes on to the end of the answer."""
        self._pass_on(json.dumps(self._take(len(self._buffer)), ensure_ascii=False)[1:-1])
        if final:
            self._pass_on('"}')
            self._state = self._drop
        return False

    def _drop(self, final: bool) -> bool:
        self._take(len(self._buffer))
        return False

    # ---- helpers --------------------------------------------------------------------------------------------------

    def _find_beginning(self) -> int | None:
        """Where in the buffer a tag begins, or an object at the beginning of a line."""
        first = self._buffer.lstrip()
        if self._is_blank and first.startswith("{"):
            return len(self._buffer) - len(first)
        line, tag = self._buffer.find("\n{"), self._buffer.find(PYTHON_TAG)
        places = [place for place in (line + 1 if line >= 0 else -1, tag) if place >= 0]
        return min(places, default=None)

    def _begin(self, name: str) -> None:
        self._is_blank = False
        self._pieces.append(CallDelta(self.calls, name))
        self.calls += 1

    def _pass_on(self, arguments: str) -> None:
        if arguments:
            self._pieces.append(CallDelta(self.calls - 1, None, arguments))

    def _give_up(self, more: int = 0) -> None:
        """What was skipped, and `more` characters behind it, are text after all."""
        self._tell(self._take(self._skipped + more))
        self._is_blank = False
        self._state = self._read_text

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _tell(self, text: str) -> None:
        if text:
            self._is_blank = False
            self._pieces.append(text)


def _certain(text: str) -> int:
    """How many characters of `text` can be told: not white space at its end, nor what may become a tag."""
    first = max(0, len(text) - len(PYTHON_TAG))
    end = next((place for place in range(first, len(text)) if PYTHON_TAG.startswith(text[place:])), len(text))
    return len(text[:end].rstrip())
