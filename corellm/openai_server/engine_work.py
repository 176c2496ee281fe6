"""How much the engine still has to do, for whichever front end: others may have joined it, and go with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

from corellm.comms.messages import Stats
from corellm.errors import CoreLLMError

POLL_S = 0.1


class Working(Protocol):
    """What is needed of an engine: its figures now."""

    def stats(self) -> Awaitable[Stats]: ...


async def engine_work(engine: Working) -> int:
    """The answers that run or wait, of all front ends; a dead engine has none. Takes as long as the engine's reply."""
    try:
        stats = await engine.stats()
    except CoreLLMError:
        return 0
    return stats.running + stats.waiting


async def until_no_work(engine: Working) -> None:
    """Wait until no front end has anything to do there. The caller sets the deadline."""
    while await engine_work(engine):  # noqa: ASYNC110  there is no event: the work is in another process
        await asyncio.sleep(POLL_S)
