"""In which order finished rows reach the output."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class OutputOrder(Generic[T]):
    """Hands out places in admission order, and holds finished items back until those before them are finished.

    With `by_input` false nothing is held back. `full` says that `window` places wait: admit no more until it is false.
    """

    def __init__(self, *, by_input: bool, window: int) -> None:
        self._by_input = by_input
        self._window = window
        self._held: dict[int, T] = {}
        self._admitted = 0
        self._next = 0  # the first place that is not released

    @property
    def full(self) -> bool:
        return self._by_input and self._admitted - self._next >= self._window

    def admit(self) -> int:
        """The next place."""
        self._admitted += 1
        return self._admitted - 1

    def finish(self, place: int, item: T) -> list[T]:
        """The item of this place is finished: which items may go out now, in order."""
        if not self._by_input:
            return [item]
        self._held[place] = item
        ready: list[T] = []
        while self._next in self._held:
            ready.append(self._held.pop(self._next))
            self._next += 1
        return ready
