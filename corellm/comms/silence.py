"""How long a peer has been silent, as its watcher lived through it."""

from __future__ import annotations

import time

_LONGEST_TICK_S = 1.0


class Silence:
    """Seconds since the last sign of life.

    A watcher that was itself stopped (Ctrl-Z, a suspended machine) must not blame its peer when it wakes: between two
    looks at most one second counts, however much time has passed.
    """

    __slots__ = ("_looked", "_silent")

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._silent = 0.0

    def heard(self) -> None:
        self._silent = 0.0

    def seconds(self) -> float:
        now = time.monotonic()
        self._silent += min(now - self._looked, _LONGEST_TICK_S)
        self._looked = now
        return self._silent
