"""An engine at rest. Blocks of a request come back a step after its last token did: when that step's result is in."""

from __future__ import annotations

import time

from corellm import EngineNode
from corellm.comms.messages import Stats


def idle_stats(engine: EngineNode, seconds: float = 2.0) -> Stats:
    """The figures of an engine whose blocks have all come back, which they must within `seconds`."""
    deadline = time.monotonic() + seconds
    while (stats := engine.stats()).kv.in_use:
        assert time.monotonic() < deadline, f"{stats.kv.in_use} blocks are in use after {seconds} s"
        time.sleep(0.02)
    return stats
