"""Find stop strings in text that arrives in pieces, and let no part of one out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """An Aho–Corasick automaton over the stop strings: constant work a character, whatever their number.

    The state is the longest end of the text that begins a stop string. Just that much is held back, so the buffer is
    never longer than the longest stop string. The match that ends first wins, and of those the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`include`: the matched string itself belongs to the text."""
        self._include = include
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]  # characters of a state, as many as it holds back
        self._found: list[str | None] = [None]  # the longest stop string that ends in a state
        for stop in stops:
            self._insert(stop)
        self._fallback = [0] * len(self._next)  # the state of the longest proper end that also begins a stop string
        self._link()
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that can be released now. After a match all further text is dropped.

        Unless `armed`, a stop string that ends in `text` does not count.
        """
        if self.matched is not None:
            return ""
        if len(self._depth) == 1:
            return text
        seen = len(self._held)
        buffer = self._held + text
        for end in range(seen + 1, len(buffer) + 1):
            self._state = self._step(self._state, buffer[end - 1])
            found = self._found[self._state]
            if armed and found is not None:
                self.matched, self._held = found, ""
                return buffer[:end] if self._include else buffer[: end - len(found)]
        cut = len(buffer) - self._depth[self._state]
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """End the text: what was held back as the possible beginning of a stop string is released."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, start=1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(depth)
                self._found.append(None)
            state = self._next[state][char]
        self._found[state] = stop

    def _link(self) -> None:
        """Fill in `_fallback` breadth first, and pass on to each state the stop strings that its ends complete."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                queue.append(child)
                shorter = self._fallback[child] = self._step(self._fallback[state], char)
                self._found[child] = self._found[child] or self._found[shorter]
