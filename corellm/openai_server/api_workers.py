"""More HTTP processes on the same port and the same engine: the kernel spreads connections over them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

import msgspec

from corellm.comms.children import Child, spawn, stop_all
from corellm.comms.run_folder import RunFolder
from corellm.errors import CoreLLMError, ServerError
from corellm.openai_server.options import ServerOptions

LAUNCH_VARIABLE = "CORELLM_API_WORKER"
LEAVE_S = 5.0


class WorkerLaunch(msgspec.Struct, frozen=True):
    """What an API worker is started with. It travels in the environment, which others cannot read: there are keys."""

    options: ServerOptions
    log_level: str


def receive_launch() -> WorkerLaunch:
    """In a worker: what it was started with."""
    return msgspec.json.decode(os.environ.pop(LAUNCH_VARIABLE), type=WorkerLaunch)


class ApiWorkers:
    """The API workers beside the main process. `on_death` is told when one dies that was not asked to leave."""

    def __init__(self, launch: WorkerLaunch, on_death: Callable[[CoreLLMError], None]) -> None:
        self._launch, self._on_death = launch, on_death
        self._children: list[Child] = []
        self._exits: list[asyncio.Future[None]] = []
        self._leaving = False

    def start(self, folder: RunFolder) -> None:
        """Start one for each API worker but the first, which is this process."""
        loop = asyncio.get_running_loop()
        environment = {LAUNCH_VARIABLE: msgspec.json.encode(self._launch).decode()}
        for number in range(2, self._launch.options.api_workers + 1):
            child = spawn(f"API worker {number}", "corellm.openai_server", [str(folder.path)], environment)
            exited: asyncio.Future[None] = loop.create_future()
            self._children.append(child)
            self._exits.append(exited)
            loop.add_reader(child.pidfd, self._on_exit, child, exited)

    async def drain(self) -> None:
        """Ask them to answer what they have and leave; wait until they have left."""
        self._leaving = True
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
        await asyncio.gather(*self._exits)

    async def close(self) -> None:
        """End those that are left."""
        self._leaving = True
        for child, exited in zip(self._children, self._exits, strict=True):
            if not exited.done():
                asyncio.get_running_loop().remove_reader(child.pidfd)
        await asyncio.to_thread(stop_all, self._children, LEAVE_S)

    def _on_exit(self, child: Child, exited: asyncio.Future[None]) -> None:
        asyncio.get_running_loop().remove_reader(child.pidfd)
        if not exited.done():
            exited.set_result(None)
        if not self._leaving:
            self._on_death(ServerError(f"{child.name} {child.describe_exit()}; the server stops"))
